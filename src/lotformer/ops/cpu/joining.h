// Rows of the prefix, and behind them coupled rows with a depthwise convolution of the values, in one pass over a layer's
// output. Channels are vectors, so nothing has to be transposed.
#pragma once
#include "head.h"
#include "joining_call.h"

namespace {

constexpr int64_t kSoon = 8;          // tokens: how far rows are asked for in advance
constexpr int64_t kUnit = 64;         // tokens that one task has at least
constexpr int64_t kFilterGroups = 32;  // partial sums for the filters: as many whatever the threads, so sums do not change

// The filters as the passes read them: (heads or 1, taps, padded), with zeros behind the last channel.
struct Filters {
  float* data;
  int padded, taps;
  bool shared;

  const float* of(int64_t h) const { return data + (shared ? 0 : h) * taps * padded; }
};

static Filters read_filters(const Join& c, const Arena& arena) {
  Filters f{nullptr, int(round_up(c.dim, W)), c.taps(), c.shared};
  const int64_t heads = c.shared ? 1 : c.heads;
  f.data = arena.zeros<float>(heads * f.taps * f.padded);
  for (int64_t h = 0; h < heads; h++)
    for (int d = 0; d < c.dim; d++)
      for (int t = 0; t < f.taps; t++)
        f.data[(h * f.taps + t) * f.padded + d] = c.filters[(h * c.dim + d) * f.taps + t];
  return f;
}

// One side of the convolution for a head of a sample: its rows after the prefix, and which of them are real.
struct Side {
  float* data;
  int64_t token;
  const uint8_t* real;
  int64_t mask;

  bool is_real(int64_t i) const { return !real || real[i * mask]; }
  float* at(int64_t i) const { return data + i * token; }
};

static Side side_of(const Join& c, const Rows& rows, const Mask& mask, int64_t b, int64_t h, int64_t skip) {
  float* data = static_cast<float*>(rows.data);
  return {data ? data + b * rows.batch + h * rows.head + skip * rows.token : nullptr, rows.token,
          mask.data ? mask.data + b * mask.batch + c.prefix * mask.token : nullptr, mask.token};
}

// The taps of one token that lie on the grid: rows and columns of the kernel, and where the first of them lies.
struct Reach {
  int rows, columns, first_tap;
  int64_t first_token;
};

static Reach reach_of(const Join& c, int64_t r, int64_t column) {
  const int64_t up = c.kernel[0] / 2, left = c.kernel[1] / 2;
  const int64_t top = most<int64_t>(0, up - r), start = most<int64_t>(0, left - column);
  return {int(least<int64_t>(c.kernel[0], c.grid[0] + up - r) - top),
          int(least<int64_t>(c.kernel[1], c.grid[1] + left - column) - start), int(top * c.kernel[1] + start),
          (r + top - up) * c.grid[1] + column + start - left};
}

// to = base + Σ filter · from for NV vectors of channels, from channel d on. Vectors reach beyond the last channel only
// if they are not WHOLE. BACK: the transposed map, whose taps lie the other way.
template <int NV, bool WHOLE, bool BACK>
LOT_INLINE void convolve_panel(const Join& c, const Reach& reach, const float* filter, int padded, const Side& from,
                               const float* base, float* to, int d) {
  const int left = c.dim - d;
  V sum[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) sum[v] = base ? load_some<WHOLE>(base + d + v * W, left) : V{};
  for (int y = 0; y < reach.rows; y++) {
    const int tap = reach.first_tap + y * c.kernel[1];
    const float* w = filter + int64_t(BACK ? c.taps() - 1 - tap : tap) * padded + d;
    const int64_t start = reach.first_token + y * c.grid[1];
    const float* x = from.at(start) + d;
    for (int i = 0; i < reach.columns; i++) {
      if (from.is_real(start + i)) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) sum[v] += load(w + v * W) * load_some<WHOLE>(x + v * W, left);
      }
      w += BACK ? -padded : padded;
      x += from.token;
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) store_some<WHOLE>(to + d + v * W, left, sum[v]);
}

// Asks for a row in advance: rows of one head lie far apart, where no prefetcher looks for them.
LOT_INLINE void ask_for(const Side& side, int64_t i, const Join& c) {
  for (int d = 0; d < c.dim; d += kLine) __builtin_prefetch(side.at(i) + d);
}

// Tokens [first, last) of a head. What is padding on the side that is written keeps its base.
template <bool BACK>
static void convolve(const Join& c, const float* filter, int padded, const Side& from, const Side& base, const Side& to,
                     int64_t first, int64_t last) {
  int64_t r = first / c.grid[1], column = first % c.grid[1];
  const int64_t ahead = c.kernel[0] / 2 * c.grid[1] + c.kernel[1] / 2 + kSoon;  // of a token: what no token has read yet
  for (int64_t i = first; i < last; i++) {
    const float* start = base.data ? base.at(i) : nullptr;
    float* out = to.at(i);
    ask_for(from, ahead + i, c);
    if (start) ask_for(base, i + kSoon, c);
    if (!to.is_real(i)) {
      if (start)
        memcpy(out, start, sizeof(float) * size_t(c.dim));
      else
        memset(out, 0, sizeof(float) * size_t(c.dim));
    } else {
      const Reach reach = reach_of(c, r, column);
      int d = 0;
      for (; d + 4 * W <= c.dim; d += 4 * W) convolve_panel<4, true, BACK>(c, reach, filter, padded, from, start, out, d);
      for (; d + W <= c.dim; d += W) convolve_panel<1, true, BACK>(c, reach, filter, padded, from, start, out, d);
      if (d < c.dim) convolve_panel<1, false, BACK>(c, reach, filter, padded, from, start, out, d);
    }
    if (++column == c.grid[1]) column = 0, r++;
  }
}

// sum (padded) += Σ grad ∘ value over tokens [first, last) of a head, for the tap that lies (down, right) of a token.
template <int NV, bool WHOLE>
LOT_INLINE void correlate_panel(const Join& c, const Side& grad, const Side& values, int64_t down, int64_t right,
                                int64_t first, int64_t last, int d, float* to) {
  const int width = c.dim - d;
  V sum[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) sum[v] = load(to + d + v * W);
  for (int64_t i = first; i < last;) {  // one row of the grid after the other
    const int64_t r = i / c.grid[1], start = r * c.grid[1], stop = least(last, start + c.grid[1]);
    const int64_t from = most(i, start - right), until = least(stop, start + c.grid[1] - right);
    i = stop;
    if (r + down < 0 || r + down >= c.grid[0]) continue;
    for (int64_t j = from; j < until; j++) {
      const int64_t at = j + down * c.grid[1] + right;
      if (!grad.is_real(j) || !values.is_real(at)) continue;
      const float *g = grad.at(j) + d, *x = values.at(at) + d;
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++)
        sum[v] += load_some<WHOLE>(g + v * W, width) * load_some<WHOLE>(x + v * W, width);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) store(to + d + v * W, sum[v]);
}

static void correlate(const Join& c, const Side& grad, const Side& values, int64_t first, int64_t last, int padded,
                      float* sums) {
  for (int t = 0; t < c.taps(); t++) {
    const int64_t down = t / c.kernel[1] - c.kernel[0] / 2, right = t % c.kernel[1] - c.kernel[1] / 2;
    float* to = sums + int64_t(t) * padded;
    int d = 0;
    for (; d + 4 * W <= c.dim; d += 4 * W) correlate_panel<4, true>(c, grad, values, down, right, first, last, d, to);
    for (; d + W <= c.dim; d += W) correlate_panel<1, true>(c, grad, values, down, right, first, last, d, to);
    if (d < c.dim) correlate_panel<1, false>(c, grad, values, down, right, first, last, d, to);
  }
}

// Writes the rows of the prefix of a sample: those given, or zeros where they are missing or of padding.
static void write_prefix(const Join& c, const Rows& rows, const Rows& out, int64_t b) {
  const Mask& mask = c.masks[kQuery];
  for (int64_t h = 0; h < c.heads; h++)
    for (int64_t i = 0; i < c.prefix; i++) {
      float* to = static_cast<float*>(out.data) + b * out.batch + h * out.head + i * out.token;
      const bool real = !mask.data || mask.data[b * mask.batch + i * mask.token];
      if (rows.data && real)
        memcpy(to, static_cast<const float*>(rows.data) + b * rows.batch + h * rows.head + i * rows.token,
               sizeof(float) * size_t(c.dim));
      else
        memset(to, 0, sizeof(float) * size_t(c.dim));
    }
}

// Samples cut into units of tokens.
struct Units {
  int64_t each, count;

  explicit Units(const Join& c) : each(most<int64_t>(1, (c.tokens() + kUnit - 1) / kUnit)), count(c.batch * each) {}
};

static void join(const Join& c) {
  const Scope scope(c.host);
  const Filters filters = read_filters(c, Arena{&c.host});
  const Units units(c);
  in_parallel(c.host, units.count, [&](int64_t unit) {
    const int64_t b = unit / units.each, first = unit % units.each * kUnit, last = least(first + kUnit, c.tokens());
    if (first == 0) write_prefix(c, c.rows, c.out, b);
    for (int64_t h = 0; h < c.heads; h++)
      convolve<false>(c, filters.of(h), filters.padded, side_of(c, c.values, c.masks[kKey], b, h, c.prefix),
                      side_of(c, c.coupled, {}, b, h, 0), side_of(c, c.out, c.masks[kQuery], b, h, c.prefix), first,
                      last);
  });
}

static void join_backward(const Join& c) {
  const Scope scope(c.host);
  const Arena arena{&c.host};
  const Filters filters = read_filters(c, arena);
  const Units units(c);
  const int64_t size = c.heads * filters.taps * filters.padded;
  const int64_t affordable = most<int64_t>(2, (int64_t(1) << 20) / most<int64_t>(1, size));
  const int64_t groups = least(units.count, least(kFilterGroups, affordable));
  float* sums = arena.zeros<float>(most<int64_t>(1, groups) * size);
  in_parallel(c.host, groups, [&](int64_t group) {
    for (int64_t unit = units.count * group / groups; unit < units.count * (group + 1) / groups; unit++) {
      const int64_t b = unit / units.each, first = unit % units.each * kUnit, last = least(first + kUnit, c.tokens());
      if (first == 0) write_prefix(c, {}, c.grad_values, b);
      for (int64_t h = 0; h < c.heads; h++) {
        const Side grad = side_of(c, c.grad, c.masks[kQuery], b, h, c.prefix);
        const Side to = side_of(c, c.grad_values, c.masks[kKey], b, h, c.prefix);
        convolve<true>(c, filters.of(h), filters.padded, grad, {}, to, first, last);
        correlate(c, grad, side_of(c, c.values, c.masks[kKey], b, h, c.prefix), first, last, filters.padded,
                  sums + group * size + h * filters.taps * filters.padded);
      }
    }
  });
  const int64_t own = c.shared ? 1 : c.heads, together = c.shared ? c.heads : 1;
  for (int64_t h = 0; h < own; h++)
    for (int d = 0; d < c.dim; d++)
      for (int t = 0; t < filters.taps; t++) {
        double total = 0;
        for (int64_t g = 0; g < groups; g++)
          for (int64_t o = 0; o < together; o++)
            total += sums[g * size + ((h + o) * filters.taps + t) * filters.padded + d];
        c.grad_filters[(h * c.dim + d) * filters.taps + t] = float(total);
      }
}

}  // namespace
