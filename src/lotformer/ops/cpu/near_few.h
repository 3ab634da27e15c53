// Forward of windows of a few keys: a vector holds as many queries, where `near_query` fills it with the keys of one.
//
// Keys are taken a column at a time: one of the prefix, or one of the window, each query's own. The queries follow each
// other and are real, as are the keys at their places; where a column has no key for a query, a query's own key stands in
// with the weight 0, since that is met anyway: nothing else is read, padding least of all.
#pragma once
#include "near_head.h"

namespace {

constexpr int kFewKeys = W / 2;  // beyond, a vector of the keys of one query wastes less

// How many keys a token meets along a sequence, at most; none if they are many.
LOT_INLINE int few_keys(const Near& c) {
  const int64_t count = c.prefix + 2 * c.reach_columns + 1;
  return c.columns >= c.length && count <= kFewKeys ? int(count) : 0;
}

// The keys of up to W queries, by columns.
template <class T>
struct Columns {
  int count = 0;
  const T *k[kFewKeys][W], *v[kFewKeys][W];
  V weight[kFewKeys];  // zero where there is no key

  void take(const T* key, const T* value) {
    for (int t = 0; t < W; t++) {
      k[count][t] = key;
      v[count][t] = value;
    }
    weight[count++] = splat(1.f);
  }

  // The keys `step` after those of the queries from i on.
  void take(const NearHead<T>& head, int64_t i, int queries, int64_t step) {
    V real = splat(1.f);
    for (int t = 0; t < W; t++) {
      const int64_t own = i + least(t, queries - 1), j = own + step;
      const bool there = j >= 0 && j < head.c.length && head.keys.has(j);
      k[count][t] = head.k.at(there ? j : own);
      v[count][t] = head.v.at(there ? j : own);
      if (!there) real[t] = 0;
    }
    weight[count++] = real;
  }
};

// Queries from i on, at most W and before `last`, that are real as are their keys.
template <class T>
LOT_INLINE int real_run(const NearHead<T>& head, int64_t i, int64_t last) {
  const int most_queries = int(least<int64_t>(W, last - i));
  int count = 0;
  while (count < most_queries && head.queries.has(i + count) && head.keys.has(i + count)) count++;
  return count;
}

// Softmax of `queries` queries from i on, over the keys of the prefix, which `head.met` lists, and their windows.
template <class T>
static void near_few_queries(NearHead<T>& head, int64_t i, int queries, int64_t prefix, const Strip<T>& out, float* peak,
                             float* sum, float* rest) {
  const Near& c = head.c;
  Columns<T> columns;
  for (int64_t p = 0; p < prefix; p++) columns.take(head.met.one[p], head.met.other[p]);
  for (int64_t step = -c.reach_columns; step <= c.reach_columns; step++) columns.take(head, i, queries, step);

  const T* q[W];
  const float* direction[W];
  for (int t = 0; t < W; t++) {
    q[t] = head.q.at(i + least(t, queries - 1));
    direction[t] = head.direction;
  }
  V score[kFewKeys], total{};
  score[0] = dot_pairs(q, columns.k[0], c.dim);
  V largest = score[0];
  for (int j = 1; j < columns.count; j++) {
    score[j] = dot_pairs(q, columns.k[j], c.dim);
    largest = vmax(largest, score[j]);  // of stand-ins, too: those are among the query's keys
  }
  for (int j = 0; j < columns.count; j++) {
    columns.weight[j] = columns.weight[j] > 0.f ? vexp((score[j] - largest) * c.scale) : V{};
    total += columns.weight[j];
  }
  store_part(peak, queries, largest * c.scale);
  store_part(sum, queries, total);
  store_part(rest, queries, dot_pairs(q, direction, c.dim) + head.offset);
  for (int j = 0; j < columns.count; j++) columns.weight[j] = columns.weight[j] / total;
  for (int t = 0; t < queries; t++)
    weigh_all(reinterpret_cast<const float*>(columns.weight) + t, &columns.v[0][t], columns.count, c.value_dim, 1.f,
              out.at(i + t), W);
}

}  // namespace
