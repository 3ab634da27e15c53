// A tile of queries, and what it meets: groups, keys of the prefix, and the keys in the window of one of them.
//
// Queries are columns of the products and what they meet are rows (see near_wide.h): the weight that a key has through its
// group is then a row of others, and taking it out is a subtraction. A tile is a piece of the grid, as wide as it is high
// as far as that saves keys; a sequence is a grid of one row.
#pragma once
#include "found_groups.h"

namespace {

constexpr int kTile = kWideQueries;
constexpr float kNobody = 1e30f;  // the log-sum of a query that reads nothing

struct Tiling {
  int64_t rows, columns, height, width, across, count;
  int64_t most_rows, most_columns;  // of the keys that the queries of a tile see

  explicit Tiling(const Found& c) : rows(1), columns(c.queries), height(1), width(kTile), most_rows(0), most_columns(0) {
    if (c.columns) {
      rows = c.queries / c.columns;
      columns = c.columns;
      int64_t least_cost = INT64_MAX;
      for (int64_t h = 1; h <= least<int64_t>(kTile, rows); h++) {
        const int64_t w = least(kTile / h, columns);
        const int64_t tall = least(h + 2 * c.reach_rows, rows), wide = least(w + 2 * c.reach_columns, columns);
        const int64_t cost = ((rows + h - 1) / h) * ((columns + w - 1) / w) * (tall * wide + c.rank + c.prefix);
        if (cost >= least_cost) continue;
        least_cost = cost, height = h, width = w, most_rows = tall, most_columns = wide;
      }
    }
    across = (columns + width - 1) / width;
    count = across * ((rows + height - 1) / height);
  }
};

// The queries of a tile by lanes, and the keys they see by lines of the grid.
struct Tile {
  const Tiling& tiling;
  int queries;
  int64_t query[kTile];  // what is left over repeats the last
  int64_t first_line, lines, first_column, length;  // of the keys
  VI *in_line, *in_column;  // (lines or length, kWideVectors): which queries see them

  Tile(const Found& c, const Tiling& t, const Arena& arena) : tiling(t), queries(0), first_line(0), lines(0),
                                                              first_column(0), length(0) {
    in_line = arena.take<VI>(most<int64_t>(t.most_rows, 1) * kWideVectors);
    in_column = arena.take<VI>(most<int64_t>(t.most_columns, 1) * kWideVectors);
    (void)c;
  }

  void take(const Found& c, int64_t which) {
    const int64_t y = which / tiling.across * tiling.height, x = which % tiling.across * tiling.width;
    const int64_t height = least(tiling.height, tiling.rows - y), width = least(tiling.width, tiling.columns - x);
    int32_t line[kTile], column[kTile];
    queries = int(height * width);
    for (int t = 0; t < kTile; t++) {
      const int64_t own = least(t, queries - 1);
      line[t] = int32_t(y + own / width);
      column[t] = int32_t(x + own % width);
      query[t] = line[t] * tiling.columns + column[t];
    }
    if (!c.columns) return;
    first_line = most<int64_t>(y - c.reach_rows, 0);
    lines = least(y + height + c.reach_rows, tiling.rows) - first_line;
    first_column = most<int64_t>(x - c.reach_columns, 0);
    length = least(x + width + c.reach_columns, tiling.columns) - first_column;
    see(line, first_line, lines, c.reach_rows, in_line);
    see(column, first_column, length, c.reach_columns, in_column);
  }

  int64_t keys() const { return lines * length; }
  // Keys of neighbouring lines follow each other if these are whole.
  int64_t spans() const { return length == tiling.columns ? least<int64_t>(lines, 1) : lines; }
  int64_t span() const { return length == tiling.columns ? keys() : length; }
  int64_t start(int64_t line) const { return (first_line + line) * tiling.columns + first_column; }

 private:
  static void see(const int32_t* own, int64_t first, int64_t count, int64_t reach, VI* to) {
    const int32_t far = int32_t(least<int64_t>(reach, 1 << 30));
    for (int v = 0; v < kWideVectors; v++) {
      VI at;
      memcpy(&at, own + v * W, sizeof at);
      for (int64_t j = 0; j < count; j++) {
        const VI apart = at - int32_t(first + j);
        to[j * kWideVectors + v] = (apart <= far) & (apart >= -far);
      }
    }
  }
};

// Rows of numbers for the queries of a tile, one for all that they meet: parts, nobody, keys of the prefix and the window.
struct FoundRows {
  float* data;
  int parts;
  int64_t prefix;

  FoundRows(const FoundKeys& keys, const Tiling& t, const Arena& arena)
      : data(arena.take<float>((keys.parts + 1 + keys.call->prefix + t.most_rows * t.most_columns) * kTile)),
        parts(keys.parts), prefix(keys.call->prefix) {}

  float* part(int64_t t) const { return data + t * kTile; }
  float* special(int64_t p) const { return data + (parts + 1 + p) * kTile; }
  float* key(int64_t j) const { return data + (parts + 1 + prefix + j) * kTile; }
};

// Calls body(key, line of the tile, place in that line, row among the keys of the tile) for every key of the window.
template <class F>
LOT_INLINE void each_key(const Tile& tile, const F& body) {
  int64_t row = 0;
  for (int64_t y = 0; y < tile.lines; y++) {
    const int64_t start = tile.start(y);
    for (int64_t x = 0; x < tile.length; x++, row++) body(start + x, y, x, row);
  }
}

// What the passes over a tile share.
struct FoundRoom {
  const FoundKeys& keys;
  const Found& c;
  Tiling tiling;
  Tile tile;
  float *query;     // (dim, queries): turned around and scaled
  FoundRows score;  // then weights
  float *left;      // (parts + 1, queries): keys of each part that are not read exactly
  float *out;       // (queries, widest)

  FoundRoom(const FoundKeys& k, const Arena& arena)
      : keys(k), c(*k.call), tiling(c), tile(c, tiling, arena), query(arena.take<float>(int64_t(c.dim) * kTile)),
        score(k, tiling, arena), left(arena.take<float>(int64_t(k.parts + 1) * kTile)),
        out(arena.take<float>(int64_t(kTile) * most(k.dim_padded, k.value_padded))) {}

  // to[row, query] = row · query, for rows of so many parts, of the prefix and of the window.
  void products(const float* parts, int count, const float* rows, int64_t stride, int width, const float* columns,
                const FoundRows& to) const {
    multiply_nn(parts, stride, count, width, columns, kTile, kWideVectors, to.part(0), kTile);
    if (c.prefix) multiply_nn(rows, stride, int(c.prefix), width, columns, kTile, kWideVectors, to.special(0), kTile);
    for (int64_t s = 0; s < tile.spans(); s++)
      multiply_nn(rows + (c.prefix + tile.start(s)) * stride, stride, int(tile.span()), width, columns, kTile,
                  kWideVectors, to.key(s * tile.span()), kTile);
  }

  // out[query, :] = Σ_rows factor[row, query] row
  void gather(const FoundRows& factor, const float* parts, const float* rows, int stride) const {
    const int vectors = stride / W;
    memset(out, 0, sizeof(float) * size_t(kTile) * size_t(stride));
    multiply_tn(factor.part(0), kTile, kTile, keys.parts, parts, stride, vectors, out, stride);
    if (c.prefix) multiply_tn(factor.special(0), kTile, kTile, int(c.prefix), rows, stride, vectors, out, stride);
    for (int64_t s = 0; s < tile.spans(); s++)
      multiply_tn(factor.key(s * tile.span()), kTile, kTile, int(tile.span()), rows + (c.prefix + tile.start(s)) * stride,
                  stride, vectors, out, stride);
  }

  // Which queries see a key of the window. Padding is in the group of nobody.
  VI sees(int64_t j, int64_t y, int64_t x, int v) const {
    const VI within = tile.in_line[y * kWideVectors + v] & tile.in_column[x * kWideVectors + v];
    return keys.part[j] < keys.parts ? within : VI{};
  }

  // Scores of the queries with all they meet, and what is left of the groups.
  void meet() const {
    products(keys.seen, c.rank, keys.k, keys.dim_padded, c.dim, query, score);
    for (int64_t t = 0; t <= keys.parts; t++)
      for (int v = 0; v < kWideVectors; v++) store(left + t * kTile + v * W, splat(keys.size[t]));
    each_key(tile, [&](int64_t j, int64_t y, int64_t x, int64_t) {
      for (int v = 0; v < kWideVectors; v++) {
        float* at = left + int64_t(keys.part[j]) * kTile + v * W;
        store(at, load(at) - (sees(j, y, x, v) ? splat(1.f) : V{}));
      }
    });
    for (int64_t t = 0; c.offset && t < c.rank; t++)
      for (int v = 0; v < kWideVectors; v++) {
        float* at = score.part(t) + v * W;
        store(at, load(at) + c.offset[keys.h]);
      }
    if (keys.parts > c.rank)  // the rest of a group has its centre, too
      memcpy(score.part(c.rank), score.part(0), sizeof(float) * size_t(c.rank) * kTile);
  }

  // Rows of queries as columns, zero where there is padding. With `rows`, also as they are, (queries, padded); what is left
  // over is zero there.
  template <class T>
  void turn(const Strip<const T>& from, int width, int padded, float factor, float* columns, float* rows) const {
    const RealTokens real = real_tokens(c.query_mask, keys.b);
    float* row = out;
    for (int t = 0; t < kTile; t++) {
      pack_row(from.at(tile.query[t]), real.has(tile.query[t]), width, padded, row);
      for (int d = 0; d < padded; d += W) store(row + d, load(row + d) * factor);
      for (int d = 0; d < width; d++) columns[d * kTile + t] = row[d];
      if (!rows) continue;
      if (t < tile.queries)
        memcpy(rows + t * padded, row, sizeof(float) * size_t(padded));
      else
        memset(rows + t * padded, 0, sizeof(float) * size_t(padded));
    }
  }
};

}  // namespace
