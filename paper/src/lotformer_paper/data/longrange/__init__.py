"""Long Range Arena: five tasks as sequences of small integers, prepared once and memory-mapped.

`tasks.TASKS` says what each task is, a source (`listops`, `text`, `image`, `pathfinder`, `retrieval`) makes or reads
its examples in shards, `prepare.prepare` turns a source into a folder of arrays, and `store.open_set` reads it.
"""
