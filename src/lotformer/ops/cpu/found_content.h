// Keys by content: the keys of the heaviest groups of a query, the first ones of each.
//
// The tiles leave them out, and choose the groups. Then each group meets all queries that have chosen it: its keys, which
// are copied together, are rows and the queries columns again, and rows of queries gain what they read there.
#pragma once
#include "found_tile.h"

namespace {

// What is known of queries before their rows are divided by their sums.
struct FoundSums {
  float *top, *near, *far;  // (queries): the largest score, and sums of weights below it: what is exact and what is not
  float* out;               // (queries, value_padded)
  int32_t* chosen;          // (heaviest, queries): groups that are read exactly, -1 where there are no more
  float* log_size;          // (rank): of the groups
};

// Writes a query's row, which is divided by the sum of its weights.
template <class T>
static void finish_query(const FoundKeys& keys, int64_t i, float* row, float top, float near, float far, T* out) {
  const Found& c = *keys.call;
  const int64_t at = (keys.b * c.heads + keys.h) * c.queries + i;
  const float sum = near + far;
  const bool any = real_tokens(c.query_mask, keys.b).has(i) && sum > 0;
  const V factor = splat(any ? 1 / sum : 0.f);
  for (int d = 0; d < keys.value_padded; d += W) store(row + d, any ? load(row + d) * factor : V{});
  c.share[at] = any ? near / sum : 0;
  c.total[at] = any ? top + vlog(splat(sum))[0] : kNobody;
  write_row(row, c.value_dim, out);
}

static FoundSums take_sums(const FoundKeys& keys, const Arena& arena) {
  const Found& c = *keys.call;
  float* numbers = arena.take<float>(3 * c.queries);
  float* log_size = arena.take<float>(c.rank);
  for (int t = 0; t < c.rank; t++) log_size[t] = std::log(keys.size[t] + keys.size[c.rank + t]);
  return {numbers, numbers + c.queries, numbers + 2 * c.queries, arena.take<float>(c.queries * keys.value_padded),
          arena.take<int32_t>(c.heaviest * c.queries), log_size};
}

// The groups of the largest weights of each query of a tile, the first of equal ones. Their keys are read elsewhere: none
// is left to be read through the centre.
static void choose_groups(const FoundRoom& room, const FoundSums& sums) {
  const Found& c = room.c;
  for (int v = 0; v < kWideVectors; v++) {
    VI before[kMostHeaviest];  // groups that are taken
    for (int turn = 0; turn < c.heaviest; turn++) {
      V best = splat(-INFINITY);
      VI index = VI{} - 1;
      for (int t = 0; t < c.rank; t++) {
        const V weight = load(room.score.part(t) + v * W) + sums.log_size[t];
        VI better = weight > best;
        for (int k = 0; k < turn; k++) better &= before[k] != t;
        best = better ? weight : best;
        index = better ? VI{} + t : index;
      }
      before[turn] = index;
      for (int lane = 0; lane < W && v * W + lane < room.tile.queries; lane++) {
        sums.chosen[turn * c.queries + room.tile.query[v * W + lane]] = index[lane];
        if (index[lane] >= 0) room.left[int64_t(index[lane]) * kTile + v * W + lane] = 0;
      }
    }
  }
}

// Adds what the queries of all groups read of their keys, and writes their rows.
template <class T>
static void found_content(const FoundKeys& keys, const FoundSums& sums, const Arena& arena) {
  const Found& c = *keys.call;
  const Scope scope(c.host);
  const int padded = keys.dim_padded, wide = keys.value_padded;
  const Strip<const T> q = strip<const T>(c.q, keys.b, keys.h);
  const RealTokens real = real_tokens(c.query_mask, keys.b);
  const int64_t columns = c.columns ? c.columns : 1;

  // queries by the groups that they have chosen
  int64_t* start = arena.zeros<int64_t>(c.rank + 2);
  for (int64_t i = 0; i < c.heaviest * c.queries; i++) start[sums.chosen[i] + 2]++;
  for (int t = 1; t < c.rank + 2; t++) start[t] += start[t - 1];
  // start[t + 1] is where group t begins; it moves to where that ends
  int32_t* query = arena.take<int32_t>(c.heaviest * c.queries);
  for (int64_t i = 0; i < c.queries; i++)
    for (int turn = 0; turn < c.heaviest; turn++) query[start[sums.chosen[turn * c.queries + i] + 1]++] = int32_t(i);

  const int64_t most_keys = least(c.most, c.keys);
  float *k = arena.take<float>(most_keys * padded), *v = arena.take<float>(most_keys * wide);
  int64_t* place = arena.take<int64_t>(most_keys);
  float *turned = arena.take<float>(int64_t(c.dim) * kTile), *weights = arena.take<float>(most_keys * kTile);
  float *row = arena.take<float>(padded), *out = arena.take<float>(int64_t(kTile) * wide);
  int64_t* next = arena.zeros<int64_t>(c.keys);  // keys of one group follow each other
  int64_t* first_of = arena.take<int64_t>(c.rank);
  int64_t* last_of = arena.take<int64_t>(c.rank);
  for (int t = 0; t < c.rank; t++) first_of[t] = last_of[t] = -1;
  for (int64_t j = 0; j < c.keys; j++) {
    const int32_t t = keys.part[j];
    if (t >= c.rank) continue;
    (last_of[t] < 0 ? first_of[t] : next[last_of[t]]) = j;
    last_of[t] = j;
    next[j] = -1;
  }

  for (int t = 0; t < c.rank; t++) {
    const int64_t first = start[t], last = start[t + 1];
    if (first == last || first_of[t] < 0) continue;
    int count = 0;
    for (int64_t j = first_of[t]; j >= 0; j = next[j], count++) {
      memcpy(k + int64_t(count) * padded, keys.key(c.prefix + j), sizeof(float) * size_t(padded));
      memcpy(v + int64_t(count) * wide, keys.value(c.prefix + j), sizeof(float) * size_t(wide));
      place[count] = j;
    }
    for (int64_t from = first; from < last; from += kTile) {
      const int queries = int(least<int64_t>(kTile, last - from));
      int32_t line[kTile], column[kTile];
      for (int lane = 0; lane < kTile; lane++) {
        const int32_t i = query[from + least(lane, queries - 1)];
        line[lane] = int32_t(i / columns);
        column[lane] = int32_t(i % columns);
        pack_row(q.at(i), real.has(i), c.dim, padded, row);
        for (int d = 0; d < c.dim; d++) turned[d * kTile + lane] = row[d] * c.scale;
      }
      multiply_nn(k, padded, count, c.dim, turned, kTile, kWideVectors, weights, kTile);
      V top[kWideVectors], sum[kWideVectors];
      for (int p = 0; p < kWideVectors; p++) {
        VI y, x;
        memcpy(&y, line + p * W, sizeof y);
        memcpy(&x, column + p * W, sizeof x);
        const auto apart = [&](int j) {  // outside of the window, where a key is read already
          if (!c.columns) return VI{} - 1;
          const VI down = y - int32_t(place[j] / columns), right = x - int32_t(place[j] % columns);
          const int32_t rows = int32_t(c.reach_rows), width = int32_t(c.reach_columns);
          return (down > rows) | (down < -rows) | (right > width) | (right < -width);
        };
        top[p] = splat(-3e38f), sum[p] = V{};
        for (int j = 0; j < count; j++)
          top[p] = apart(j) ? vmax(top[p], load(weights + j * kTile + p * W)) : top[p];
        for (int j = 0; j < count; j++) {
          float* at = weights + j * kTile + p * W;
          const V weight = apart(j) ? vexp(load(at) - top[p]) : V{};
          sum[p] += weight;
          store(at, weight);
        }
      }
      memset(out, 0, sizeof(float) * size_t(kTile) * size_t(wide));
      multiply_tn(weights, kTile, kTile, count, v, wide, wide / W, out, wide);
      for (int p = 0; p < kWideVectors; p++)
        for (int lane = 0; lane < W && p * W + lane < queries; lane++) {
          if (!(sum[p][lane] > 0)) continue;
          const int64_t i = query[from + p * W + lane];
          const float highest = most(sums.top[i], top[p][lane]);
          const float before = vexp(splat(sums.top[i] - highest))[0], now = vexp(splat(top[p][lane] - highest))[0];
          float* to = sums.out + i * wide;
          const float* add = out + (p * W + lane) * wide;
          for (int d = 0; d < wide; d += W) store(to + d, load(to + d) * before + load(add + d) * now);
          sums.top[i] = highest;
          sums.near[i] = sums.near[i] * before + sum[p][lane] * now;
          sums.far[i] *= before;
        }
    }
  }
  const Strip<T> to = strip<T>(c.out, keys.b, keys.h);
  for (int64_t i = 0; i < c.queries; i++)
    finish_query(keys, i, sums.out + i * wide, sums.top[i], sums.near[i], sums.far[i], to.at(i));
}

}  // namespace
