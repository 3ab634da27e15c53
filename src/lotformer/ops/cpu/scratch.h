// Scratch memory of a thread: a stack that keeps its pages from call to call.
#pragma once
#include <cstddef>

namespace lot {

void* take_scratch(size_t bytes);   // 64-byte aligned; throws std::bad_alloc
size_t mark_scratch();              // where the stack stands
void release_scratch(size_t mark);  // back to there; an empty stack gives large memory back to the system

// Asks for huge pages behind fresh large memory: touching it page by page costs as much as the products on it.
void prefer_huge_pages(void* data, size_t bytes);

}  // namespace lot
