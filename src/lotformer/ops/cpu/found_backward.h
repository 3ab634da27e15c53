// Gradients through groups that are held fixed: of a head, tile by tile, in one order. Sums of keys stay in scratch.
#pragma once
#include "found_tile.h"

namespace {

struct FoundGradients {
  const FoundKeys& keys;
  const Found& c;
  FoundRoom room;
  FoundRows product;                    // of what is met with the gradient of the output
  float *grad;                          // (value_dim, queries): turned around
  float *query_rows, *grad_rows;        // (queries, ·)
  float *of_k, *of_v, *of_seen, *of_sum;  // shapes of what the keys hold
  float of_offset = 0;

  FoundGradients(const FoundKeys& k, const Arena& arena)
      : keys(k), c(*k.call), room(k, arena), product(k, room.tiling, arena),
        grad(arena.take<float>(int64_t(c.value_dim) * kTile)),
        query_rows(arena.take<float>(int64_t(kTile) * k.dim_padded)),
        grad_rows(arena.take<float>(int64_t(kTile) * k.value_padded)), of_k(arena.zeros<float>(k.all * k.dim_padded)),
        of_v(arena.zeros<float>(k.all * k.value_padded)),
        of_seen(arena.zeros<float>(int64_t(c.rank) * k.dim_padded)),
        of_sum(arena.zeros<float>(int64_t(c.rank) * k.value_padded)) {}

  // What is met gains Σ_queries factor[row, query] query.
  void scatter(const FoundRows& factor, const float* queries, int stride, float* groups, float* rows) const {
    const int vectors = stride / W;
    const Tile& tile = room.tile;
    multiply_nn<true>(factor.part(0), kTile, c.rank, kTile, queries, stride, vectors, groups, stride);
    if (c.prefix) multiply_nn<true>(factor.special(0), kTile, int(c.prefix), kTile, queries, stride, vectors, rows, stride);
    for (int64_t s = 0; s < tile.spans(); s++)
      multiply_nn<true>(factor.key(s * tile.span()), kTile, int(tile.span()), kTile, queries, stride, vectors,
                        rows + (c.prefix + tile.start(s)) * stride, stride);
  }

  template <class T>
  void add_tile(int64_t which) {
    const FoundRows& score = room.score;
    const Tile& tile = room.tile;
    room.tile.take(c, which);
    room.turn(strip<const T>(c.q, keys.b, keys.h), c.dim, keys.dim_padded, c.scale, room.query, query_rows);
    room.turn(strip<const T>(c.grad_out, keys.b, keys.h), c.value_dim, keys.value_padded, 1.f, grad, grad_rows);
    room.meet();
    room.products(keys.sum, keys.parts, keys.v, keys.value_padded, c.value_dim, grad, product);
    const RealTokens real = real_tokens(c.key_mask, keys.b), queries = real_tokens(c.query_mask, keys.b);
    float totals[kTile];
    for (int t = 0; t < kTile; t++) {
      const bool own = t < tile.queries && queries.has(tile.query[t]);
      totals[t] = own ? c.total[(keys.b * c.heads + keys.h) * c.queries + tile.query[t]] : kNobody;
    }
    V total[kWideVectors], mean[kWideVectors];
    for (int v = 0; v < kWideVectors; v++) total[v] = load(totals + v * W), mean[v] = V{};

    // weights, and what the keys that are still read through a group make of the gradient together
    for (int v = 0; v < kWideVectors; v++) {
      for (int64_t t = 0; t < c.rank; t++) {
        float* at = score.part(t) + v * W;
        store(at, load(room.left + t * kTile + v * W) > 0.5f ? vexp(load(at) - total[v]) : V{});
      }
      store(score.part(c.rank) + v * W, V{});
      store(product.part(c.rank) + v * W, V{});
      for (int64_t p = 0; p < c.prefix; p++) {
        float* at = score.special(p) + v * W;
        const V weight = real.has(p) ? vexp(load(at) - total[v]) : V{};
        store(at, weight);
        mean[v] += weight * load(product.special(p) + v * W);
      }
    }
    each_key(tile, [&](int64_t j, int64_t y, int64_t x, int64_t row) {
      for (int v = 0; v < kWideVectors; v++) {
        float *at = score.key(row) + v * W, *rest = product.part(keys.group[j]) + v * W;
        const VI seen = room.sees(j, y, x, v);
        const V own = load(product.key(row) + v * W), weight = seen ? vexp(load(at) - total[v]) : V{};
        store(at, weight);
        store(rest, load(rest) - (seen ? own : V{}));
        mean[v] += weight * own;
      }
    });
    for (int v = 0; v < kWideVectors; v++)
      for (int64_t t = 0; t < c.rank; t++)
        mean[v] += load(score.part(t) + v * W) * load(product.part(t) + v * W);

    // scores' gradients take the place of the products; of weights what counts for the values is left
    V offsets{};
    for (int v = 0; v < kWideVectors; v++) {
      for (int64_t t = 0; t < c.rank; t++) {
        float* at = product.part(t) + v * W;
        const V left = load(room.left + t * kTile + v * W);
        const V slope = load(score.part(t) + v * W) * (load(at) - left * mean[v]);
        store(at, slope);
        offsets += slope;
      }
      for (int64_t p = 0; p < c.prefix; p++) {
        float* at = product.special(p) + v * W;
        store(at, load(score.special(p) + v * W) * (load(at) - mean[v]));
      }
    }
    of_offset += reduce_spread<Add>(offsets)[0];
    each_key(tile, [&](int64_t j, int64_t y, int64_t x, int64_t row) {
      for (int v = 0; v < kWideVectors; v++) {
        float *at = product.key(row) + v * W, *weight = score.key(row) + v * W;
        const VI seen = room.sees(j, y, x, v);
        store(at, load(weight) * (load(at) - mean[v]));
        store(weight, seen ? load(weight) - load(score.part(keys.group[j]) + v * W) : V{});
      }
    });
    scatter(score, grad_rows, keys.value_padded, of_sum, of_v);
    scatter(product, query_rows, keys.dim_padded, of_seen, of_k);
    room.gather(product, keys.seen, keys.k, keys.dim_padded);
    const Strip<T> to = strip<T>(c.grad_q, keys.b, keys.h);
    for (int t = 0; t < tile.queries; t++) {
      float* row = room.out + t * keys.dim_padded;
      const bool own = queries.has(tile.query[t]);
      for (int d = 0; d < keys.dim_padded; d += W) store(row + d, own ? load(row + d) * c.scale : V{});
      write_row(row, c.dim, to.at(tile.query[t]));
    }
  }

  // Through the means and sums of the groups.
  template <class T>
  void write() {
    const int64_t which = keys.b * c.heads + keys.h;
    const float gain = c.gain ? c.gain[keys.h] : 1;
    const int padded = keys.dim_padded;
    float* shift = c.grad_shift + which * c.dim;
    float of_gain = 0;
    memset(shift, 0, sizeof(float) * size_t(c.dim));
    for (int t = 0; t < c.rank; t++) {
      float* row = of_seen + t * padded;
      of_gain += dot(row, keys.centre + t * padded, padded);
      for (int d = 0; d < c.dim; d++) shift[d] += row[d];
      const float each = keys.size[t] > 0 ? gain / keys.size[t] : 0;
      for (int d = 0; d < padded; d++) row[d] *= each;
    }
    c.grad_gain[which] = of_gain;
    c.grad_offset[which] = of_offset;
    const RealTokens real = real_tokens(c.key_mask, keys.b);
    const Strip<T> to_k = strip<T>(c.grad_k, keys.b, keys.h), to_v = strip<T>(c.grad_v, keys.b, keys.h);
    for (int64_t j = 0; j < keys.all; j++) {
      float *k = of_k + j * padded, *v = of_v + j * keys.value_padded;
      if (!real.has(j)) {
        memset(k, 0, sizeof(float) * size_t(padded));
        memset(v, 0, sizeof(float) * size_t(keys.value_padded));
      } else if (j >= c.prefix && keys.group[j - c.prefix] < c.rank) {
        const int64_t t = keys.group[j - c.prefix];
        for (int d = 0; d < padded; d += W) store(k + d, load(k + d) + load(of_seen + t * padded + d));
        for (int d = 0; d < keys.value_padded; d += W) store(v + d, load(v + d) + load(of_sum + t * keys.value_padded + d));
      }
      write_row(k, c.dim, to_k.at(j));
      write_row(v, c.value_dim, to_v.at(j));
    }
  }
};

template <class T>
static void found_backward_of(const Found& c) {
  in_parallel(c.host, c.batch * c.heads, [&](int64_t which) {
    const Scope scope(c.host);
    const Arena arena{&c.host};
    const FoundKeys keys(c, which, arena);
    prepare_keys<T>(keys);
    FoundGradients gradients(keys, arena);
    for (int64_t tile = 0; tile < gradients.room.tiling.count; tile++) gradients.template add_tile<T>(tile);
    gradients.template write<T>();
  });
}

}  // namespace
