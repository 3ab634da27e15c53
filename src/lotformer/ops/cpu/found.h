// Softmax of every query over what is near and over groups of the other keys, which are found in the sample:
//
//   out_i ∝ Σ_t w_it (Σ_{j∈t} v_j) + Σ_{j∈prefix} exp(s_ij) v_j + Σ_{j∈window} (exp(s_ij) − w_it(j)) v_j
//
// where w_it = exp(q_i·z_t + b) counts for the keys of group t that are not in the window, and is zero where there are none:
// what is taken out of a group is then never more than a part of what is left.
// Backward forms the weights anew from the log-sums of the rows.
#pragma once
#include "found_backward.h"
#include "found_content.h"

namespace {

template <class T>
static void found_tile_forward(FoundRoom& room, int64_t which, const FoundSums* sums) {
  const FoundKeys& keys = room.keys;
  const Found& c = room.c;
  const FoundRows& score = room.score;
  room.tile.take(c, which);
  room.turn(strip<const T>(c.q, keys.b, keys.h), c.dim, keys.dim_padded, c.scale, room.query, nullptr);
  room.meet();
  if (sums) choose_groups(room, *sums);
  const RealTokens real = real_tokens(c.key_mask, keys.b);
  V top[kWideVectors], near[kWideVectors], far[kWideVectors];
  for (int v = 0; v < kWideVectors; v++) {
    top[v] = splat(-3e38f), near[v] = far[v] = V{};
    for (int64_t t = 0; t < keys.parts; t++) {
      const V one = load(score.part(t) + v * W);
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
    for (int64_t t = 0; t < keys.parts; t++) {
      const V count = load(room.left + t * kTile + v * W);
      const V weight = count > 0.5f ? vexp(load(score.part(t) + v * W) - top[v]) : V{};
      far[v] += weight * count;
      store(score.part(t) + v * W, weight);
    }
    store(score.part(keys.parts) + v * W, V{});
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
      store(at, seen ? weight - load(score.part(keys.part[j]) + v * W) : V{});
    }
  });
  room.gather(score, keys.sum, keys.v, keys.value_padded);
  const Strip<T> out = strip<T>(c.out, keys.b, keys.h);
  for (int t = 0; t < room.tile.queries; t++) {
    const int64_t i = room.tile.query[t];
    const int v = t / W, lane = t % W;
    float* row = room.out + t * keys.value_padded;
    if (!sums) {
      finish_query(keys, i, row, top[v][lane], near[v][lane], far[v][lane], out.at(i));
      continue;
    }
    sums->top[i] = top[v][lane];
    sums->near[i] = near[v][lane];
    sums->far[i] = far[v][lane];
    memcpy(sums->out + i * keys.value_padded, row, sizeof(float) * size_t(keys.value_padded));
  }
}

// Heads side by side; tiles too, without keys by content, where there are fewer heads than threads.
template <class T>
static void found_forward_of(const Found& c) {
  const Scope scope(c.host);
  const Arena arena{&c.host};
  const Tiling tiling(c);
  const int64_t heads = c.batch * c.heads;
  const auto run = [&](const FoundKeys& keys, int64_t first, int64_t last, const FoundSums* sums) {
    const Scope own(c.host);
    FoundRoom room(keys, arena);
    for (int64_t tile = first; tile < last; tile++) found_tile_forward<T>(room, tile, sums);
  };
  const auto guarded = [&](int64_t count, const auto& body) {
    in_parallel(c.host, count, [&](int64_t i) {
      const Scope own(c.host);
      c.host.scratch(1);  // keeps the memory of the stack
      body(i);
    });
  };
  if (heads >= c.host.threads() || c.heaviest) {
    guarded(heads, [&](int64_t which) {
      const FoundKeys keys(c, which, arena);
      prepare_keys<T>(keys);
      if (!c.heaviest) return run(keys, 0, tiling.count, nullptr);
      const FoundSums sums = take_sums(keys, arena);
      run(keys, 0, tiling.count, &sums);
      found_content<T>(keys, sums, arena);
    });
    return;
  }
  FoundKeys* keys = arena.take<FoundKeys>(heads);
  for (int64_t which = 0; which < heads; which++) keys[which] = FoundKeys(c, which, arena);
  guarded(heads, [&](int64_t which) { prepare_keys<T>(keys[which]); });
  const int64_t parts = least<int64_t>(tiling.count, 4 * c.host.threads());
  guarded(heads * parts, [&](int64_t i) {
    const int64_t part = i % parts;
    run(keys[i / parts], tiling.count * part / parts, tiling.count * (part + 1) / parts, nullptr);
  });
}

static void found_forward(const Found& c) { c.bf16 ? found_forward_of<uint16_t>(c) : found_forward_of<float>(c); }

static void found_backward(const Found& c) { c.bf16 ? found_backward_of<uint16_t>(c) : found_backward_of<float>(c); }

}  // namespace
