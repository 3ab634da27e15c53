#include "scratch.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace lot {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kKept = size_t(4) << 20;     // of an idle thread
constexpr size_t kSmallest = size_t(1) << 18;

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kWorthIt = size_t(1) << 20;

// Large memory asks for huge pages: it is streamed once per sweep. Null if there is none.
char* allocate(size_t size) {
  void* data = nullptr;
  const bool large = size >= 2 * kHugePage;
  if (posix_memalign(&data, large ? kHugePage : kAlignment, size) != 0) return nullptr;
#ifdef __linux__
  if (large) madvise(data, size, MADV_HUGEPAGE);
#endif
  return static_cast<char*>(data);
}

struct Piece {
  char* data;
  size_t size, begin;  // `begin`: offset of its first byte in the stack

  bool fits(size_t top, size_t bytes) const { return (top > begin ? top : begin) + bytes <= begin + size; }
};

struct Stack {
  std::vector<Piece> pieces;
  size_t top = 0;
  const bool poison = std::getenv("LOTFORMER_CPU_POISON") != nullptr;

  ~Stack() { shrink(0); }

  void shrink(size_t count) {
    while (pieces.size() > count) {
      std::free(pieces.back().data);
      pieces.pop_back();
    }
  }

  void* take(size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    size_t at = 0;
    while (at < pieces.size() && !pieces[at].fits(top, bytes)) at++;
    if (at == pieces.size()) {
      const size_t begin = pieces.empty() ? 0 : pieces.back().begin + pieces.back().size;
      const size_t size = bytes > kSmallest ? bytes : kSmallest;
      pieces.push_back({nullptr, size, begin});
      pieces.back().data = allocate(size);
      if (pieces.back().data == nullptr) {
        pieces.pop_back();
        throw std::bad_alloc();
      }
    }
    Piece& piece = pieces[at];
    if (top < piece.begin) top = piece.begin;
    char* result = piece.data + (top - piece.begin);
    top += bytes;
    if (poison) std::memset(result, 0xff, bytes);  // every float and double becomes NaN
    return result;
  }

  // Called by destructors: it never throws.
  void release(size_t mark) {
    top = mark;
    if (mark != 0 || pieces.empty()) return;
    const size_t total = pieces.back().begin + pieces.back().size;
    if (total > kKept) {
      shrink(0);
    } else if (pieces.size() > 1) {  // one piece the next time
      shrink(0);
      if (char* data = allocate(total)) pieces.push_back({data, total, 0});
    }
  }
};

thread_local Stack stack;

}  // namespace

void prefer_huge_pages(void* data, size_t bytes) {
#ifdef __linux__
  if (bytes < kWorthIt) return;
  const size_t start = reinterpret_cast<size_t>(data), page = kHugePage;
  const size_t first = (start + page - 1) / page * page, last = (start + bytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

void* take_scratch(size_t bytes) { return stack.take(bytes); }
size_t mark_scratch() { return stack.top; }
void release_scratch(size_t mark) { stack.release(mark); }

}  // namespace lot
