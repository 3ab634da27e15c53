// What the passes over one head share: its tokens, its pivots and its scratch.
//
// Tokens are processed in blocks of kBlock rows so that a block of scores stays in the first-level cache between
// the stages of a pass. Rows of scores have `padded` columns, a multiple of the vector width; the columns beyond
// `rank` carry the potential kNothing and hence the weight zero.
#pragma once
#include "call.h"
#include "gemm.h"

namespace {

using namespace lot;

constexpr int kBlock = 96;
constexpr int64_t kWorthBorrowing = 1 << 18;  // numbers: more do not stay in a cache anyway
constexpr float kNothing = -1e30f;
constexpr float kTiny = 1e-37f;

LOT_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Arena {
  const Host* host;
  template <class T>
  T* take(int64_t count) const {
    return static_cast<T*>(host->scratch(size_t(count) * sizeof(T)));
  }
  template <class T>
  T* zeros(int64_t count) const {
    T* p = take<T>(count);
    memset(p, 0, size_t(count) * sizeof(T));
    return p;
  }
};

// Gives scratch back when it goes out of scope, whichever way: an allocation that fails throws.
struct Scope {
  const Host& host;
  const size_t mark;

  explicit Scope(const Host& h) : host(h), mark(h.mark()) {}
  Scope(const Scope&) = delete;
  ~Scope() { host.release(mark); }
};

// body(i) for every i below `count`.
template <class F>
static void in_parallel(const Host& host, int64_t count, const F& body) {
  host.parallel(
      count,
      [](int64_t begin, int64_t end, void* context) {
        for (int64_t i = begin; i < end; i++) (*static_cast<const F*>(context))(i);
      },
      const_cast<F*>(&body));
}

// Masses of tokens, padded with zeros to whole blocks. Where all are alike, all blocks but the last one share memory.
struct TokenMasses {
  const float* data;
  const float* last = nullptr;  // with it:
  int64_t whole = 0;            // tokens in whole blocks

  const float* at(int64_t block) const { return !last ? data + block : block < whole ? data : last; }
  float of(int64_t token) const { return at(token / kBlock * kBlock)[token % kBlock]; }
};

static TokenMasses equal_masses(int64_t count, const Arena& arena) {
  float* block = arena.take<float>(kBlock);
  float* last = arena.zeros<float>(kBlock);
  const int64_t whole = count / kBlock * kBlock;
  for (int i = 0; i < kBlock; i++) block[i] = float(1.0 / double(count));
  for (int64_t i = whole; i < count; i++) last[i - whole] = block[0];
  return {block, last, whole};
}

// The tokens of one head on one side that have mass (queries of zero mass keep their row), in order.
struct Tokens {
  Rows rows;             // positioned at this head
  bool bf16;
  int64_t count;         // tokens listed
  const int32_t* index;  // their positions, nullptr when that is 0, 1, 2, …
  TokenMasses mass;      // sum 1
  double total;          // of the masses as given
};

static Tokens list_tokens(const Call& c, int side, int64_t b, int64_t h, const Arena& arena) {
  Tokens t;
  const int64_t length = c.length[side];
  t.rows = c.tokens[side];
  const int64_t offset = b * t.rows.batch + h * t.rows.head;
  t.rows.data = static_cast<char*>(t.rows.data) + offset * (c.bf16 ? 2 : 4);
  t.bf16 = c.bf16;
  t.index = nullptr;
  t.count = length;
  t.total = double(length);
  const Masses& masses = c.masses[side];
  const Mask& mask = c.masks[side];
  float* mass = masses.data ? arena.take<float>(round_up(length, kBlock)) : nullptr;
  if (masses.data || mask.data) {
    int32_t* index = arena.take<int32_t>(length);
    const float* given = masses.data ? masses.data + b * masses.batch + h * masses.head : nullptr;
    const uint8_t* real = mask.data ? mask.data + b * mask.batch : nullptr;
    t.count = 0;
    t.total = 0;
    for (int64_t i = 0; i < length; i++) {
      if (real && !real[i * mask.token]) continue;
      const float one = given ? given[i * masses.token] : 1.f;
      if (side == kKey && !(one > 0)) continue;
      if (mass) mass[t.count] = one;
      index[t.count++] = int32_t(i);
      t.total += one;
    }
    if (t.count < length) t.index = index;
  }
  if (!mass) {
    t.mass = equal_masses(t.count, arena);
    return t;
  }
  for (int64_t i = 0; i < t.count; i++)
    mass[i] = t.total > 0 ? float(mass[i] / t.total) : float(1.0 / double(t.count));
  for (int64_t i = t.count; i < round_up(t.count, kBlock); i++) mass[i] = 0;
  t.mass = {mass};
  return t;
}

// Rows of a matrix, `ld` floats apart: to read, and to write. Whole blocks may be `step` apart, and what is left after the
// last of them lie in `tail`.
template <class T>
struct Matrix {
  T* data;
  int64_t ld;
  T* tail = nullptr;  // with it:
  int64_t step = 0, whole = 0;  // rows in whole blocks

  Matrix at(int64_t row) const {
    if (!tail) return {data + row * ld, ld};
    if (row >= whole) return {tail + (row - whole) * ld, ld};
    return {data + row / kBlock * step + row % kBlock * ld, ld};
  }
  operator Matrix<const T>() const { return {data, ld, tail, step, whole}; }
};

using View = Matrix<const float>;
using Block = Matrix<float>;

// Rows [first, first + count) of a tensor that belongs to the tokens, as fp32. `vectors` asks for rows padded with
// zeros to whole vectors. Nothing is copied when the tensor already is what is asked for.
static View read_rows(const Tokens& t, const Rows& rows, int64_t first, int count, int width, bool vectors,
                      float* buffer) {
  if (!t.bf16 && !t.index && (!vectors || width % W == 0))
    return {static_cast<const float*>(rows.data) + first * rows.token, rows.token};
  const int64_t ld = round_up(width, W);
  for (int i = 0; i < count; i++) {
    const int64_t at = (t.index ? t.index[first + i] : first + i) * rows.token;
    float* to = buffer + i * ld;
    if (t.bf16) {
      const uint16_t* from = static_cast<const uint16_t*>(rows.data) + at;
      for (int d = 0; d < width; d++) to[d] = from_bf16(from[d]);
    } else {
      memcpy(to, static_cast<const float*>(rows.data) + at, size_t(width) * 4);
    }
    for (int64_t d = width; d < ld; d++) to[d] = 0;
  }
  return {buffer, ld};
}

// Where `write_rows` may be spared: the rows of the tensor themselves if they can be written as whole vectors.
static Block target_rows(const Tokens& t, const Rows& rows, int64_t first, int width, float* buffer) {
  if (!t.bf16 && !t.index && width % W == 0) return {static_cast<float*>(rows.data) + first * rows.token, rows.token};
  return {buffer, round_up(width, W)};
}

static void write_rows(const Tokens& t, const Rows& rows, int64_t first, int count, int width, const View& from,
                       const float* buffer) {
  if (from.data != buffer) return;
  for (int i = 0; i < count; i++) {
    const int64_t at = (t.index ? t.index[first + i] : first + i) * rows.token;
    const float* row = from.data + i * from.ld;
    if (t.bf16) {
      uint16_t* to = static_cast<uint16_t*>(rows.data) + at;
      for (int d = 0; d < width; d++) to[d] = to_bf16(row[d]);
    } else {
      memcpy(static_cast<float*>(rows.data) + at, row, size_t(width) * 4);
    }
  }
}

static Rows at_head(const Rows& rows, bool bf16, int64_t b, int64_t h) {
  Rows r = rows;
  r.data = static_cast<char*>(r.data) + (b * r.batch + h * r.head) * (bf16 ? 2 : 4);
  return r;
}

// Zero the rows of tokens that are not listed.
static void clear_padding(const Tokens& t, const Rows& rows, int64_t length, int width) {
  if (!t.index && t.count == length) return;
  const size_t item = t.bf16 ? 2 : 4;
  int64_t next = 0;
  for (int64_t i = 0; i < length; i++) {
    if (next < t.count && (!t.index || t.index[next] == i)) {
      next++;
      continue;
    }
    memset(static_cast<char*>(rows.data) + size_t(i * rows.token) * item, 0, size_t(width) * item);
  }
}

// Pivots and masses of a head.
struct Measure {
  int rank, padded, vectors, dim, dim_padded;
  float temperature;
  float* scaled_transposed;  // (dim, padded): temperature · zᵀ, or nullptr where tokens are given by their scores
  float* scaled;             // (padded, dim_padded): temperature · z
  float *log_mass, *mass;    // (padded): log m and kNothing, m and 0
  float* zero;               // (padded): the potential zero, and kNothing
};

// Masses of the pivots, given as logarithms, with sum 1; what is beyond the rank weighs nothing. Not a number stays so.
template <class T>
static void normalise_masses(const T* given, int rank, float lightest, int padded, float* log_mass, float* mass) {
  auto weighed = [&](int j) { return double(given[j] < lightest ? T(lightest) : given[j]); };
  double top = weighed(0), total = 0;
  for (int j = 1; j < rank; j++) top = most(top, weighed(j));
  for (int j = 0; j < rank; j++) total += exp(weighed(j) - top);
  const double norm = top + log(total);
  for (int j = 0; j < padded; j++) {
    log_mass[j] = j < rank ? float(weighed(j) - norm) : kNothing;
    mass[j] = j < rank ? float(exp(weighed(j) - norm)) : 0.f;
  }
}

static void read_masses(const Call& c, int64_t h, int padded, float* log_mass, float* mass) {
  normalise_masses(c.log_masses + h * c.rank, c.rank, c.least_log_mass, padded, log_mass, mass);
}

static int64_t pivots_at(const Call& c, int64_t b, int64_t h) {
  return ((c.own_pivots ? b * c.heads : 0) + h) * c.rank * c.dim;
}

static Measure sizes_of(const Call& c) {
  Measure m{};
  m.rank = c.rank;
  m.padded = int(round_up(c.rank, W));
  m.vectors = m.padded / W;
  m.dim = c.dim;
  m.dim_padded = int(round_up(c.dim, W));
  return m;
}

static Measure read_measure(const Call& c, int64_t b, int64_t h, const Arena& arena) {
  Measure m = sizes_of(c);
  m.temperature = c.temperatures ? c.temperatures[h] : c.temperature;
  if (!c.scored) {
    m.scaled_transposed = arena.zeros<float>(int64_t(m.dim) * m.padded);
    m.scaled = arena.zeros<float>(int64_t(m.padded) * m.dim_padded);
    const float* z = c.pivots + pivots_at(c, b, h);
    for (int j = 0; j < m.rank; j++)
      for (int d = 0; d < m.dim; d++) {
        const float x = z[j * m.dim + d] * m.temperature;
        m.scaled[j * m.dim_padded + d] = x;
        m.scaled_transposed[d * m.padded + j] = x;
      }
  }
  m.zero = arena.take<float>(m.padded);
  for (int j = 0; j < m.padded; j++) m.zero[j] = j < m.rank ? 0.f : kNothing;
  m.log_mass = arena.take<float>(m.padded);
  m.mass = arena.take<float>(m.padded);
  read_masses(c, h, m.padded, m.log_mass, m.mass);
  return m;
}

// Scratch of one worker on a head.
struct Worker {
  float *input, *output;     // blocks of token rows
  Block plan, other;         // blocks of scores
  float *shift, *sum, *weight, *extra;  // one number per row of a block
  float* column;             // (padded) partial column sums of a block
  double *columns, *columns2;  // (padded) column sums of a range of tokens
  float* product;            // (padded, widest) partial of an r-sized product
  double top;                // largest row shift met
};

struct Head {
  const Call* call;
  Arena arena;
  Measure pivots;
  int64_t b, h;
  int value_padded;
  float unit;  // backward: of values, and of all gradients that are proportional to them until they are written
  int workers;
  Worker* worker;

  // Runs body(worker, first, last) over a split of `count` tokens into whole blocks.
  template <class F>
  void each_range(int64_t count, const F& body) const {
    const int64_t blocks = (count + kBlock - 1) / kBlock;
    if (workers == 1 || blocks < 2) {
      for (int w = 1; w < workers; w++) body(worker[w], int64_t(0), int64_t(0));
      body(worker[0], int64_t(0), count);
      return;
    }
    struct Context {
      const Head* head;
      const F* body;
      int64_t blocks, count;
    } context{this, &body, blocks, count};
    call->host.parallel(
        workers,
        [](int64_t begin, int64_t end, void* raw) {
          const Context& x = *static_cast<Context*>(raw);
          for (int64_t w = begin; w < end; w++)
            (*x.body)(x.head->worker[w], least(x.blocks * w / x.head->workers * kBlock, x.count),
                      least(x.blocks * (w + 1) / x.head->workers * kBlock, x.count));
        },
        &context);
  }
};

// For every sample of the batch: `b` says which one is worked on.
static Head open_head(const Call& c, int64_t h, int workers) {
  Head head;
  head.call = &c;
  head.arena = Arena{&c.host};
  head.b = 0;
  head.h = h;
  head.unit = 1;
  head.pivots = c.own_pivots ? sizes_of(c) : read_measure(c, 0, h, head.arena);
  head.value_padded = int(round_up(c.value_dim, W));
  head.workers = workers;
  head.worker = head.arena.take<Worker>(workers);
  const int64_t padded = head.pivots.padded;
  const int64_t widest = most<int64_t>(most(head.pivots.dim_padded, head.value_padded), padded);
  for (int w = 0; w < workers; w++) {
    Worker& k = head.worker[w];
    k.input = head.arena.take<float>(kBlock * widest);
    k.output = head.arena.take<float>(kBlock * widest);
    k.plan = {head.arena.take<float>(kBlock * padded), padded};
    k.other = {head.arena.take<float>(kBlock * padded), padded};
    float* numbers = head.arena.take<float>(4 * kBlock);
    k.shift = numbers;
    k.sum = numbers + kBlock;
    k.weight = numbers + 2 * kBlock;
    k.extra = numbers + 3 * kBlock;
    k.column = head.arena.take<float>(padded);
    k.columns = head.arena.take<double>(padded);
    k.columns2 = head.arena.take<double>(padded);
    k.product = head.arena.take<float>(padded * widest);
    k.top = 0;
  }
  return head;
}

// Memory for the kernel or the scores of some tokens, one row per token.
static Block take_rows(const Head& head, const Tokens& t) {
  const int64_t padded = head.pivots.padded;
  return {head.arena.take<float>(round_up(t.count, kBlock) * padded), padded};
}

// Whether the rows of a long sequence fit into the memory of a result that will be written over them, `places` times: into
// that of as many tokens, block by block, so that whoever writes a block has read it. That is a little slower than scratch,
// which is only large next to inputs and outputs if there is but one head.
static bool can_borrow(const Head& head, const Tokens& t, const Rows& result, int64_t length, int width, int places) {
  const int64_t padded = head.pivots.padded;
  const bool one = head.call->batch * head.call->heads == 1;
  return one && t.count * padded >= kWorthBorrowing && !t.bf16 && t.count <= length && result.token == width &&
         places * padded <= width;
}

// In scratch only what passes write up to a whole vector.
static Block borrow_rows(const Head& head, const Tokens& t, const Rows& result, int place) {
  const int64_t padded = head.pivots.padded, size = kBlock * padded;
  return {static_cast<float*>(result.data) + place * size, padded, head.arena.take<float>(size), kBlock * result.token,
          t.count / kBlock * kBlock};
}

// To be called first for every sample, in scratch that is released with it.
static void enter_sample(Head& head) {
  if (head.call->own_pivots) head.pivots = read_measure(*head.call, head.b, head.h, head.arena);
}

static void start_columns(const Head& head) {
  for (int w = 0; w < head.workers; w++) {
    memset(head.worker[w].columns, 0, sizeof(double) * size_t(head.pivots.padded));
    memset(head.worker[w].columns2, 0, sizeof(double) * size_t(head.pivots.padded));
  }
}

static void collect_columns(const Head& head) {
  for (int w = 1; w < head.workers; w++)
    for (int j = 0; j < head.pivots.padded; j++) {
      head.worker[0].columns[j] += head.worker[w].columns[j];
      head.worker[0].columns2[j] += head.worker[w].columns2[j];
    }
}

static void start_products(const Head& head, int width) {
  for (int w = 0; w < head.workers; w++)
    memset(head.worker[w].product, 0, sizeof(float) * size_t(head.pivots.padded) * size_t(width));
}

static void collect_products(const Head& head, int width) {
  float* sum = head.worker[0].product;
  for (int w = 1; w < head.workers; w++)
    for (int64_t j = 0; j < int64_t(head.pivots.padded) * width; j++) sum[j] += head.worker[w].product[j];
}

}  // namespace
