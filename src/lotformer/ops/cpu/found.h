// Softmax of every query over what is near and over groups of the other keys, which are found in the sample:
//
//   out_i ∝ Σ_t w_it (Σ_{j∈t} v_j) + Σ_{j∈prefix} exp(s_ij) v_j + Σ_{j∈window} (exp(s_ij) − w_it(j)) v_j
//
// where w_it = exp(q_i·z_t + b) counts for the keys of group t that are not in the window, and is zero where there are none:
// what is taken out of a group is then never more than a part of what is left.
// Backward forms the weights anew from the log-sums of the rows.
#pragma once
#include "found_backward.h"
#include "found_tile.h"

namespace {

template <class T>
static void found_tile_forward(FoundRoom& room, int64_t which) {
  const FoundKeys& keys = room.keys;
  const Found& c = room.c;
  const FoundRows& score = room.score;
  room.tile.take(c, which);
  room.turn(strip<const T>(c.q, keys.b, keys.h), c.dim, keys.dim_padded, c.scale, room.query, nullptr);
  room.meet();
  const RealTokens real = real_tokens(c.key_mask, keys.b);
  V top[kWideVectors], near[kWideVectors], far[kWideVectors];
  for (int v = 0; v < kWideVectors; v++) top[v] = splat(-3e38f), near[v] = far[v] = V{};
  for (int v = 0; v < kWideVectors; v++) {
    for (int64_t t = 0; t < c.rank; t++) {
      const V one = load(score.group(t) + v * W);
      top[v] = load(room.left + t * kTile + v * W) > 0.5f ? vmax(top[v], one) : top[v];
    }
    for (int64_t p = 0; p < c.prefix; p++)
      if (real.has(p)) top[v] = vmax(top[v], load(score.special(p) + v * W));
  }
  each_key(room.tile, [&](int64_t j, int64_t y, int64_t x, int64_t row) {
    for (int v = 0; v < kWideVectors; v++)
      top[v] = room.sees(j, y, x, v) ? vmax(top[v], load(score.key(row) + v * W)) : top[v];
  });
  for (int v = 0; v < kWideVectors; v++) {
    for (int64_t t = 0; t < c.rank; t++) {
      const V count = load(room.left + t * kTile + v * W);
      const V weight = count > 0.5f ? vexp(load(score.group(t) + v * W) - top[v]) : V{};
      far[v] += weight * count;
      store(score.group(t) + v * W, weight);
    }
    store(score.group(c.rank) + v * W, V{});
    for (int64_t p = 0; p < c.prefix; p++) {
      const V weight = real.has(p) ? vexp(load(score.special(p) + v * W) - top[v]) : V{};
      near[v] += weight;
      store(score.special(p) + v * W, weight);
    }
  }
  each_key(room.tile, [&](int64_t j, int64_t y, int64_t x, int64_t row) {
    for (int v = 0; v < kWideVectors; v++) {
      float* at = score.key(row) + v * W;
      const VI seen = room.sees(j, y, x, v);
      const V weight = seen ? vexp(load(at) - top[v]) : V{};
      near[v] += weight;
      store(at, seen ? weight - load(score.group(keys.group[j]) + v * W) : V{});
    }
  });
  room.gather(score, keys.sum, keys.v, keys.value_padded);

  const Strip<T> out = strip<T>(c.out, keys.b, keys.h);
  const RealTokens queries = real_tokens(c.query_mask, keys.b);
  float *share = c.share + (keys.b * c.heads + keys.h) * c.queries;
  float *total = c.total + (keys.b * c.heads + keys.h) * c.queries;
  for (int v = 0; v < kWideVectors; v++) {
    const V sum = near[v] + far[v];
    const V part = near[v] / (sum > 0.f ? sum : splat(1.f)), log_sum = top[v] + vlog(sum > 0.f ? sum : splat(1.f));
    for (int lane = 0; lane < W && v * W + lane < room.tile.queries; lane++) {
      const int t = v * W + lane;
      const int64_t i = room.tile.query[t];
      const bool any = queries.has(i) && sum[lane] > 0;
      share[i] = any ? part[lane] : 0;
      total[i] = any ? log_sum[lane] : kNobody;
      float* row = room.out + t * keys.value_padded;
      const V factor = splat(any ? 1 / sum[lane] : 0.f);
      for (int d = 0; d < keys.value_padded; d += W) store(row + d, any ? load(row + d) * factor : V{});
      write_row(row, c.value_dim, out.at(i));
    }
  }
}

// Heads side by side; tiles too, where there are fewer heads than threads.
template <class T>
static void found_forward_of(const Found& c) {
  const Scope scope(c.host);
  const Arena arena{&c.host};
  const Tiling tiling(c);
  const int64_t heads = c.batch * c.heads;
  const auto run = [&](const FoundKeys& keys, int64_t first, int64_t last) {
    const Scope own(c.host);
    FoundRoom room(keys, arena);
    for (int64_t tile = first; tile < last; tile++) found_tile_forward<T>(room, tile);
  };
  const auto guarded = [&](int64_t count, const auto& body) {
    in_parallel(c.host, count, [&](int64_t i) {
      const Scope own(c.host);
      c.host.scratch(1);  // keeps the memory of the stack
      body(i);
    });
  };
  if (heads >= c.host.threads()) {
    guarded(heads, [&](int64_t which) {
      const FoundKeys keys(c, which, arena);
      prepare_keys<T>(keys);
      run(keys, 0, tiling.count);
    });
    return;
  }
  FoundKeys* keys = arena.take<FoundKeys>(heads);
  for (int64_t which = 0; which < heads; which++) keys[which] = FoundKeys(c, which, arena);
  guarded(heads, [&](int64_t which) { prepare_keys<T>(keys[which]); });
  const int64_t parts = least<int64_t>(tiling.count, 4 * c.host.threads());
  guarded(heads * parts, [&](int64_t i) {
    const int64_t part = i % parts;
    run(keys[i / parts], tiling.count * part / parts, tiling.count * (part + 1) / parts);
  });
}

static void found_forward(const Found& c) { c.bf16 ? found_forward_of<uint16_t>(c) : found_forward_of<float>(c); }

static void found_backward(const Found& c) { c.bf16 ? found_backward_of<uint16_t>(c) : found_backward_of<float>(c); }

}  // namespace
