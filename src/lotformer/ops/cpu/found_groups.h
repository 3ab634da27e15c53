// The keys of a head, packed, and their groups: assignment and mean, a few times, as plain/groups.py defines them.
//
// Sums are in one order, whatever the number of threads. Products with the centres have the keys of a block as columns, so
// that the best centre is found by comparing vectors, and equal centres tie exactly: the first one wins.
#pragma once
#include "found_call.h"
#include "near_wide.h"

namespace {

constexpr int64_t kSampled = 8;    // queries for each dimension, as in plain/groups.py
constexpr int64_t kAdded = 1024;  // keys that are added before their sum is added to others, for the sake of fp32

// What all queries of a head read. Rows are padded to whole vectors, and all zero where there is padding.
struct FoundKeys {
  const Found* call;
  int64_t b, h, all;            // all: keys with the prefix
  int dim_padded, value_padded;
  float *k, *v;                 // (all, ·)
  int32_t* group;               // (keys): `rank` for padding
  float *centre, *seen;         // (rank, ·): means of keys, and these corrected, as queries see them
  // What counts together for a query: groups, or with keys by content the keys of each group that may be read so, and
  // behind these the rest of each.
  int parts;
  int32_t* part;                // (keys): `parts` for padding
  float *size, *sum;            // (parts + 1), nobody is in the last; (parts, ·) sums of values

  FoundKeys(const Found& c, int64_t which, const Arena& arena)
      : call(&c), b(which / c.heads), h(which % c.heads), all(c.prefix + c.keys),
        dim_padded(int(round_up(c.dim, W))), value_padded(int(round_up(c.value_dim, W))) {
    k = arena.take<float>(all * dim_padded);
    v = arena.take<float>(all * value_padded);
    group = arena.take<int32_t>(c.keys);
    centre = arena.take<float>(int64_t(c.rank) * dim_padded);
    seen = arena.take<float>(int64_t(c.rank) * dim_padded);
    parts = c.heaviest ? 2 * c.rank : c.rank;
    part = c.heaviest ? arena.take<int32_t>(c.keys) : group;
    size = arena.take<float>(parts + 1);
    sum = arena.take<float>(int64_t(parts) * value_padded);
  }

  const float* key(int64_t i) const { return k + i * dim_padded; }
  const float* value(int64_t i) const { return v + i * value_padded; }
};

LOT_INLINE void copy_row(const float* from, int width, float* to) { memcpy(to, from, sizeof(float) * size_t(width)); }
LOT_INLINE void copy_row(const uint16_t* from, int width, float* to) {
  for (int d = 0; d < width; d++) to[d] = from_bf16(from[d]);
}

// A row as fp32, padded with zeros; of padding all zeros.
template <class T>
LOT_INLINE void pack_row(const T* from, bool real, int width, int padded, float* to) {
  if (!real) {
    memset(to, 0, sizeof(float) * size_t(padded));
    return;
  }
  copy_row(from, width, to);
  for (int d = width; d < padded; d++) to[d] = 0;
}

// A power of two that brings numbers of up to this size to about one.
static float unit_of(float largest) {
  if (!(largest > 0) || !(largest < 3e38f)) return 1;
  return std::ldexp(1.f, int(-most(-126, least(126, std::ilogb(largest)))));
}

static float largest_of(const float* x, int64_t count) {  // whole vectors
  V top{};
  for (int64_t i = 0; i < count; i += W) {
    const V y = load(x + i);
    top = vmax(top, vmax(y, -y));
  }
  return reduce_spread<Max>(top)[0];
}

// to[t, :] = Σ_j row_j over the keys of part t of `parts`, and how many these are.
static void add_parts(const FoundKeys& keys, const int32_t* index, int parts, const float* rows, int padded, float* to,
                      float* size, const Arena& arena) {
  const Found& c = *keys.call;
  const int64_t count = int64_t(parts + 1) * padded;
  float* part = arena.take<float>(count);
  for (int t = 0; t <= parts; t++) size[t] = 0;
  for (int64_t j = 0; j < c.keys; j++) size[index[j]] += 1;
  size[parts] = 0;
  memset(to, 0, sizeof(float) * size_t(count - padded));
  for (int64_t first = 0; first < c.keys; first += kAdded) {
    const int64_t last = least(first + kAdded, c.keys);
    memset(part, 0, sizeof(float) * size_t(count));
    for (int64_t j = first; j < last; j++) {
      float* sum = part + int64_t(index[j]) * padded;
      for (int d = 0; d < padded; d += W) store(sum + d, load(sum + d) + load(rows + j * padded + d));
    }
    for (int64_t i = 0; i < count - padded; i += W) store(to + i, load(to + i) + load(part + i));
  }
}

// Means of the keys of each group; what has none keeps what it is.
static void means_of_groups(const FoundKeys& keys, float* centre, const Arena& arena) {
  const Found& c = *keys.call;
  const Scope scope(*arena.host);
  float *sum = arena.take<float>(int64_t(c.rank) * keys.dim_padded), *size = arena.take<float>(c.rank + 1);
  add_parts(keys, keys.group, c.rank, keys.key(c.prefix), keys.dim_padded, sum, size, arena);
  for (int t = 0; t < c.rank; t++)
    for (int d = 0; size[t] > 0 && d < keys.dim_padded; d++)
      centre[t * keys.dim_padded + d] = sum[t * keys.dim_padded + d] / size[t];
}

// Σ_i q_i q_iᵀ over real queries, up to a factor: evenly sampled, if they are many.
template <class T>
static void metric_of(const FoundKeys& keys, float* metric, const Arena& arena) {
  const Found& c = *keys.call;
  const int padded = keys.dim_padded;
  const Strip<const T> q = strip<const T>(c.q, keys.b, keys.h);
  const RealTokens real = real_tokens(c.query_mask, keys.b);
  int64_t count = 0;
  for (int64_t i = 0; i < c.queries; i++) count += real.has(i);
  const int64_t step = most<int64_t>(1, count / (kSampled * c.dim));
  float* rows = arena.take<float>((count + step - 1) / step * padded);
  int64_t sampled = 0;
  for (int64_t i = 0, place = 0; i < c.queries; i++) {
    if (!real.has(i) || place++ % step) continue;
    pack_row(q.at(i), true, c.dim, padded, rows + sampled++ * padded);
  }
  const V unit = splat(unit_of(largest_of(rows, sampled * padded)));
  for (int64_t d = 0; d < sampled * padded; d += W) store(rows + d, load(rows + d) * unit);
  memset(metric, 0, sizeof(float) * size_t(padded) * size_t(padded));
  for (int64_t i = 0; i < sampled; i += kBlock)
    multiply_symmetric(rows + i * padded, padded, padded / W, int(least<int64_t>(kBlock, sampled - i)), metric, padded);
  for (int i = 0; i < padded; i++)
    for (int j = 0; j < i; j++) metric[i * padded + j] = metric[j * padded + i];
}

// The nearest centre of every key of a block: the first with the largest of `nearness`, (rank, kWideQueries).
static void nearest_centres(const float* nearness, const float* half, int rank, int32_t* to) {
  for (int v = 0; v < kWideVectors; v++) {
    V best = load(nearness + v * W) - half[0];
    VI index{};
    for (int t = 1; t < rank; t++) {
      const V one = load(nearness + int64_t(t) * kWideQueries + v * W) - half[t];
      const VI better = one > best;
      best = better ? one : best;
      index = better ? VI{} + t : index;
    }
    memcpy(to + v * W, &index, sizeof index);
  }
}

template <class T>
static void find_groups(const FoundKeys& keys, const Arena& arena) {
  const Found& c = *keys.call;
  const Scope scope(c.host);
  const int padded = keys.dim_padded;
  const RealTokens real = real_tokens(c.key_mask, keys.b, c.prefix);
  const int64_t blocks = (c.keys + kWideQueries - 1) / kWideQueries, width = int64_t(c.dim) * kWideQueries;
  float* metric = arena.take<float>(int64_t(padded) * padded);
  metric_of<T>(keys, metric, arena);

  // keys around their mean, as columns: what is common to all tells nothing but costs digits
  float* mean = arena.zeros<float>(padded);
  int64_t count = 0;
  int64_t* places = arena.take<int64_t>(c.keys);
  for (int64_t j = 0; j < c.keys; j++)
    if (real.has(j)) places[count++] = j;
  for (int64_t first = 0; first < c.keys; first += kAdded) {
    for (int d = 0; d < padded; d += W) {
      V part{};
      for (int64_t j = first; j < least(first + kAdded, c.keys); j++) part += load(keys.key(c.prefix + j) + d);
      store(mean + d, load(mean + d) + part);
    }
  }
  for (int d = 0; d < padded; d++) mean[d] /= float(most<int64_t>(count, 1));
  const float unit = unit_of(largest_of(keys.key(c.prefix), c.keys * padded));
  float* columns = arena.take<float>(blocks * width);
  for (int64_t block = 0; block < blocks; block++) {
    float* to = columns + block * width;
    for (int t = 0; t < kWideQueries; t++) {
      const float* row = keys.key(c.prefix + least(block * kWideQueries + t, c.keys - 1));
      for (int d = 0; d < c.dim; d++) to[d * kWideQueries + t] = (row[d] - mean[d]) * unit;
    }
  }

  float *centre = arena.zeros<float>(int64_t(c.rank) * padded), *seen = arena.take<float>(int64_t(c.rank) * padded);
  float *half = arena.take<float>(c.rank), *nearness = arena.take<float>(int64_t(c.rank) * kWideQueries);
  const V to_unit = splat(unit);
  for (int t = 0; t < c.rank && count; t++)
    memcpy(keys.centre + t * padded, keys.key(c.prefix + places[t * (count - 1) / most(c.rank - 1, 1)]),
           sizeof(float) * size_t(padded));
  for (int step = 0; step < c.steps && count; step++) {
    for (int t = 0; t < c.rank; t++)
      for (int d = 0; d < padded; d += W)
        store(centre + t * padded + d, (load(keys.centre + t * padded + d) - load(mean + d)) * to_unit);
    multiply_nn(centre, padded, c.rank, c.dim, metric, padded, padded / W, seen, padded);
    for (int t = 0; t < c.rank; t++) half[t] = 0.5f * dot(seen + t * padded, centre + t * padded, padded);
    for (int64_t block = 0; block < blocks; block++) {
      int32_t nearest[kWideQueries];
      multiply_nn(seen, padded, c.rank, c.dim, columns + block * width, kWideQueries, kWideVectors, nearness,
                  kWideQueries);
      nearest_centres(nearness, half, c.rank, nearest);
      const int64_t first = block * kWideQueries;
      for (int64_t j = first; j < least(first + kWideQueries, c.keys); j++)
        keys.group[j] = real.has(j) ? nearest[j - first] : c.rank;
    }
    if (step < c.steps - 1) means_of_groups(keys, keys.centre, arena);
  }
  for (int64_t j = 0; j < c.keys && !count; j++) keys.group[j] = c.rank;
}

// Packs the keys of a head, puts them into groups, unless these are given, and sums up what is in each.
template <class T>
static void prepare_keys(const FoundKeys& keys) {
  const Found& c = *keys.call;
  const Arena arena{&c.host};
  const Scope scope(c.host);
  const Strip<const T> k = strip<const T>(c.k, keys.b, keys.h), v = strip<const T>(c.v, keys.b, keys.h);
  const RealTokens real = real_tokens(c.key_mask, keys.b);
  for (int64_t j = 0; j < keys.all; j++) {
    pack_row(k.at(j), real.has(j), c.dim, keys.dim_padded, keys.k + j * keys.dim_padded);
    pack_row(v.at(j), real.has(j), c.value_dim, keys.value_padded, keys.v + j * keys.value_padded);
  }
  const int64_t which = keys.b * c.heads + keys.h;
  if (c.given) {
    for (int64_t j = 0; j < c.keys; j++) {
      const int64_t t = c.given[which * c.keys + j];
      keys.group[j] = int32_t(real.has(c.prefix + j) && t >= 0 && t < c.rank ? t : c.rank);
    }
  } else {
    find_groups<T>(keys, arena);
  }
  if (c.groups)
    for (int64_t j = 0; j < c.keys; j++) c.groups[which * c.keys + j] = keys.group[j];
  memset(keys.centre, 0, sizeof(float) * size_t(c.rank) * size_t(keys.dim_padded));
  means_of_groups(keys, keys.centre, arena);
  if (c.heaviest) {
    int32_t* place = arena.zeros<int32_t>(c.rank + 1);
    for (int64_t j = 0; j < c.keys; j++) {
      const int32_t t = keys.group[j];
      keys.part[j] = t == c.rank ? keys.parts : place[t]++ < c.most ? t : c.rank + t;
    }
  }
  add_parts(keys, keys.part, keys.parts, keys.value(c.prefix), keys.value_padded, keys.sum, keys.size, arena);
  const float gain = c.gain ? c.gain[keys.h] : 1;
  for (int t = 0; t < c.rank; t++)
    for (int d = 0; d < keys.dim_padded; d++) {
      const float shift = c.shift && d < c.dim ? c.shift[keys.h * c.dim + d] : 0;
      keys.seen[t * keys.dim_padded + d] = keys.centre[t * keys.dim_padded + d] * gain + shift;
    }
}

}  // namespace
