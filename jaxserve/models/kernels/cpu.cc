// Products that XLA:CPU is slow at, for x86-64 processors with AVX-512. `native.py` says what each computes and when it
// is used, and every one has a twin in XLA. Built by `build.py`; nothing here runs before somebody calls it.
//
// Grouped product: y[row] = kernels[expert of row] @ x[row] for rows sorted by expert.
//
// Weights are what there is most of, so they are read where they lie, once, in blocks of kBlock outputs, while the next
// block is fetched. Every number of y is summed in float32 in one order, whatever else is in the call and in whichever
// block it falls, so that its bits do not depend on its company. Numbers too small to be normal count as zero, as they
// do in the instructions for bfloat16.

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

enum Form : int32_t { kFloat32 = 0, kBfloat16 = 1, kBfloat16Tiles = 2 };

constexpr int64_t kLine = 64;                 // bytes of a cache line, and of a vector
constexpr int64_t kTile = 16;                 // rows of a packed tile
constexpr int64_t kBlock = 32;                // outputs whose weights meet all rows before the next ones do
constexpr int64_t kRowBytes = 1 << 20;        // of rows that meet a block: they stay in the second cache
constexpr int64_t kUnitBytes = 512 << 10;     // of weights that a thread takes at a time, at most
constexpr unsigned kFlush = 0x8040 | 0x1f80;  // of the control register: flush to zero, all exceptions masked

// --- threads ---------------------------------------------------------------------------------------------------------

// A thread of the pool may have any control register: a number's bits must not depend on who computes it.
class FlushToZero {
 public:
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(kFlush); }
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// Calls `work` with 0 .. tasks - 1, here and in XLA's own pool. Whoever is free takes the next one, and the caller
// takes part, so that it ends even if no thread of the pool ever comes; one that comes late finds nothing to do.
void parallel(ffi::ThreadPool& pool, int64_t tasks, std::function<void(int64_t)> work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    int64_t tasks;
    std::function<void(int64_t)> work;
    void help() {
      FlushToZero flush;
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        work(task);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->tasks = tasks;
  shared->work = std::move(work);
  const int64_t helpers = std::min(pool.num_threads(), tasks) - 1;
  for (int64_t helper = 0; helper < helpers; helper++) pool.Schedule([shared] { shared->help(); });
  shared->help();
  for (int turns = 0; shared->done.load(std::memory_order_acquire) < tasks; turns++) {
    turns < 4096 ? _mm_pause() : std::this_thread::yield();
  }
}

// --- what is to be multiplied ----------------------------------------------------------------------------------------

struct Problem {
  Form form;
  const char* x;        // [p, k]
  const char* kernels;  // [e, n, k]
  float* y;             // [p, n]
  uint32_t* packed;     // tiles of `words` times 16 words
  int64_t bytes;        // of a row of x or of a kernel
  int64_t words;        // of a packed row: a multiple of 16
  int64_t outputs;
};

// Rows of one expert, from `first` on, and where the first of its packed tiles is.
struct Group {
  int64_t expert, first, rows, tile;
  int64_t tiles() const { return (rows + kTile - 1) / kTile; }
};

// Into the second cache: the first is too small for a block, and the rows of one often share a few of its sets. Blocks
// are fetched little by little while all rows meet the one before: the memory works as long as the processor does.
inline const char* fetch(const char* from, int lines) {
  for (int line = 0; line < lines; line++) _mm_prefetch(from + line * kLine, _MM_HINT_T1);
  return from + lines * kLine;
}

// --- dot products along k: float32, and bfloat16 without tiles -------------------------------------------------------
//
// A number is summed in 16 lanes, k modulo 16 (pairs of bfloat16 modulo 16), and then over the lanes, always alike.

constexpr int kAtOnce = 6;  // rows whose sums with four outputs stay in registers

struct Float32 {
  static __m512 multiply(__m512 sum, __m512i x, __m512i weight) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(weight), sum);
  }
};

struct Bfloat16 {
  static __m512 multiply(__m512 sum, __m512i x, __m512i weight) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight);
  }
};

// The sums over the lanes of four vectors.
inline __m128 over_lanes(const __m512 sum[4]) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(sum[0], sum[1]), _mm512_unpackhi_ps(sum[0], sum[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(sum[2], sum[3]), _mm512_unpackhi_ps(sum[2], sum[3]));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// `count` rows times four outputs, of which the first `outputs` are there: y[row][output].
template <class Numbers, int count>
inline void dots(const char* x, const char* weights, int64_t bytes, const char*& next, int lines, float* y,
                 int64_t stride, int64_t outputs) {
  __m512 sum[count][4];
  const char* kernel[4];
  for (int i = 0; i < 4; i++) kernel[i] = weights + (i < outputs ? i : 0) * bytes;
  for (int row = 0; row < count; row++) {
    for (int i = 0; i < 4; i++) sum[row][i] = _mm512_setzero_ps();
  }
  int64_t at = 0;
  for (; at + kLine <= bytes; at += kLine) {
    if (next) next = fetch(next, lines);
    __m512i weight[4];
    for (int i = 0; i < 4; i++) weight[i] = _mm512_loadu_si512(kernel[i] + at);
    for (int row = 0; row < count; row++) {
      const __m512i numbers = _mm512_loadu_si512(x + row * bytes + at);
      for (int i = 0; i < 4; i++) sum[row][i] = Numbers::multiply(sum[row][i], numbers, weight[i]);
    }
  }
  if (at < bytes) {
    const __mmask64 there = (uint64_t{1} << (bytes - at)) - 1;
    for (int row = 0; row < count; row++) {
      const __m512i numbers = _mm512_maskz_loadu_epi8(there, x + row * bytes + at);
      for (int i = 0; i < 4; i++) {
        sum[row][i] = Numbers::multiply(sum[row][i], numbers, _mm512_maskz_loadu_epi8(there, kernel[i] + at));
      }
    }
  }
  const __mmask8 stored = (1u << outputs) - 1;
  for (int row = 0; row < count; row++) _mm_mask_storeu_ps(y + row * stride, stored, over_lanes(sum[row]));
}

template <class Numbers>
void block_of_dots(const Problem& given, const Group& group, int64_t output, int64_t end) {
  const char* kernel = given.kernels + group.expert * given.outputs * given.bytes;
  const char *next = kernel + (output + kBlock) * given.bytes, *behind = next + kBlock * given.bytes;
  const int lines = std::max<int64_t>(4 / ((group.rows + kAtOnce - 1) / kAtOnce), 1);
  for (int64_t row = 0; row < group.rows;) {
    const int64_t left = group.rows - row, count = left <= kAtOnce ? left : left < 2 * kAtOnce ? left / 2 : kAtOnce;
    const char* x = given.x + (group.first + row) * given.bytes;
    float* y = given.y + (group.first + row) * given.outputs;
    for (int64_t four = output; four < end; four += 4) {
      const int64_t outputs = std::min<int64_t>(4, end - four);
      const auto run = [&](auto of) {
        of(x, kernel + four * given.bytes, given.bytes, next, lines, y + four, given.outputs, outputs);
      };
      switch (count) {
        case 1: run(dots<Numbers, 1>); break;
        case 2: run(dots<Numbers, 2>); break;
        case 3: run(dots<Numbers, 3>); break;
        case 4: run(dots<Numbers, 4>); break;
        case 5: run(dots<Numbers, 5>); break;
        case 6: run(dots<Numbers, 6>); break;
      }
    }
    if (next >= behind) next = nullptr;
    row += count;
  }
}

// --- tiles: bfloat16 by AMX ------------------------------------------------------------------------------------------
//
// Rows of x are packed by 16, [words][16], where a word is a pair of numbers, and the product comes transposed,
// [outputs][16]. A number is summed in the order of k.

struct alignas(kLine) TileShapes {  // as `ldtilecfg` reads them: eight tiles of 16 rows of 64 bytes
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The tiles' registers of a thread, while it needs them.
class Tiles {
 public:
  explicit Tiles(bool needed) : needed_(needed) {
    static const TileShapes shapes;
    if (needed_) _tile_loadconfig(&shapes);
  }
  ~Tiles() {
    if (needed_) _tile_release();
  }

 private:
  bool needed_;
};

// Packs rows of a group into one of its tiles.
void pack(const Problem& given, const Group& group, int64_t tile) {
  const int64_t first = tile * kTile, count = std::min(kTile, group.rows - first), whole = given.bytes / 4;
  const char* from = given.x + (group.first + first) * given.bytes;
  uint32_t* to = given.packed + (group.tile + tile) * given.words * kTile;
  const __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i places = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(given.bytes));
  const __mmask16 there = (1u << count) - 1;
  for (int64_t word = 0; word < whole; word++) {
    const __m512i column = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, places, from + word * 4, 1);
    _mm512_store_si512(to + word * kTile, column);
  }
  std::memset(to + whole * kTile, 0, (given.words - whole) * kTile * 4);
  for (int64_t row = 0; given.bytes % 4 && row < count; row++) {  // half a pair
    std::memcpy(to + whole * kTile + row, from + row * given.bytes + whole * 4, given.bytes % 4);
  }
}

// 32 outputs, whose weights are `stride` bytes apart, times one packed tile or two.
template <bool two>
inline void tile_dots(const char* weights, int64_t stride, const uint32_t* x, int64_t words, const char*& next,
                      int lines, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t word = 0; word < words; word += 16) {
    if (next) next = fetch(next, lines);
    _tile_loadd(4, weights + word * 4, stride);
    _tile_loadd(5, weights + 16 * stride + word * 4, stride);
    _tile_loadd(6, x + word * kTile, kLine);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (two) {
      _tile_loadd(7, x + (words + word) * kTile, kLine);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kLine);
  _tile_stored(1, sums + 16 * kTile, kLine);
  if (two) {
    _tile_stored(2, sums + kBlock * kTile, kLine);
    _tile_stored(3, sums + (kBlock + 16) * kTile, kLine);
  }
}

// Turns sums of a tile, [kBlock][16], round into its rows of y.
void deliver(const Problem& given, const float* sums, int64_t row, int64_t rows, int64_t output, int64_t end) {
  const __m512i down = _mm512_set_epi32(240, 224, 208, 192, 176, 160, 144, 128, 112, 96, 80, 64, 48, 32, 16, 0);
  for (; output < end; output += 16, sums += 16 * kTile) {
    const __mmask16 stored = (1u << std::min<int64_t>(16, end - output)) - 1;
    for (int64_t i = 0; i < rows; i++) {
      const __m512 numbers = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), stored, down, sums + i, 4);
      _mm512_mask_storeu_ps(given.y + (row + i) * given.outputs + output, stored, numbers);
    }
  }
}

void block_of_tiles(const Problem& given, const Group& group, int64_t output, int64_t end) {
  alignas(kLine) float sums[2 * kBlock * kTile];
  const int64_t stride = given.words * 4;
  const char* weights = given.kernels + (group.expert * given.outputs + output) * given.bytes;
  const char* next = weights + kBlock * given.bytes;
  std::vector<char> whole;
  if (end - output < kBlock || stride != given.bytes) {  // it ends within a tile, behind which anything may stand
    whole.resize(kBlock * stride);
    for (int64_t row = 0; row < end - output; row++) {
      std::memcpy(whole.data() + row * stride, weights + row * given.bytes, given.bytes);
    }
    weights = whole.data();
    next = nullptr;
  }
  const int passes = (group.tiles() + 1) / 2, lines = (kBlock + passes - 1) / passes;
  for (int64_t tile = 0; tile < group.tiles(); tile += 2) {
    const uint32_t* x = given.packed + (group.tile + tile) * given.words * kTile;
    const bool two = tile + 1 < group.tiles();
    (two ? tile_dots<true> : tile_dots<false>)(weights, stride, x, given.words, next, lines, sums);
    for (int64_t one = 0; one <= two; one++) {
      const int64_t row = (tile + one) * kTile;
      const int64_t rows = std::min(kTile, group.rows - row);
      deliver(given, sums + one * kBlock * kTile, group.first + row, rows, output, end);
    }
  }
}

// --- the whole product -----------------------------------------------------------------------------------------------

std::vector<Group> groups_of(const int32_t* ends, int64_t experts, int64_t rows, int64_t most) {
  std::vector<Group> groups;
  int64_t first = 0, tile = 0;
  for (int64_t expert = 0; expert < experts; expert++) {
    const int64_t end = std::min<int64_t>(ends[expert], rows);
    while (first < end) {
      groups.push_back({expert, first, std::min(end - first, most), tile});
      first += groups.back().rows;
      tile += groups.back().tiles();
    }
  }
  return groups;
}

void compute(ffi::ThreadPool& pool, const Problem& given, const std::vector<Group>& groups) {
  struct Unit {
    const Group* group;
    int64_t from, to;  // tiles to pack, or outputs
  };
  std::vector<Unit> packing, units;
  const bool tiles = given.form == kBfloat16Tiles;
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1), block_bytes = kBlock * given.bytes;
  const int64_t share = groups.size() * given.outputs * given.bytes / (8 * threads);
  const int64_t step = std::max<int64_t>(std::min(kUnitBytes, share) / std::max<int64_t>(block_bytes, 1), 1) * kBlock;
  for (const Group& group : groups) {
    for (int64_t tile = 0; tiles && tile < group.tiles(); tile++) packing.push_back({&group, tile, tile + 1});
    for (int64_t output = 0; output < given.outputs; output += step) {
      units.push_back({&group, output, std::min(output + step, given.outputs)});
    }
  }
  const auto pack_one = [&](int64_t task) { pack(given, *packing[task].group, packing[task].from); };
  if (packing.size() * given.words * kTile < 1 << 15) {  // sooner done than somebody wakes up
    for (size_t task = 0; task < packing.size(); task++) pack_one(task);
  } else {
    parallel(pool, packing.size(), pack_one);
  }
  parallel(pool, units.size(), [&](int64_t task) {
    const Unit& unit = units[task];
    const Tiles registers(tiles);
    const auto block = tiles                    ? block_of_tiles
                       : given.form == kFloat32 ? block_of_dots<Float32>
                                                : block_of_dots<Bfloat16>;
    for (int64_t output = unit.from; output < unit.to; output += kBlock) {
      block(given, *unit.group, output, std::min(output + kBlock, unit.to));
    }
  });
}

ffi::Error grouped(ffi::ThreadPool pool, int32_t form, ffi::AnyBuffer x, ffi::AnyBuffer kernels,
                   ffi::Buffer<ffi::S32> ends, ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::U32> packed) {
  const auto rows = x.dimensions(), held = kernels.dimensions(), room = packed->dimensions();
  const auto type = form == kFloat32 ? ffi::F32 : ffi::BF16;
  if (rows.size() != 2 || held.size() != 3 || room.size() != 3 || rows[1] != held[2] || form < 0 || form > 2 ||
      x.element_type() != type || kernels.element_type() != type ||
      ends.element_count() != static_cast<size_t>(held[0])) {
    return ffi::Error::InvalidArgument("the grouped product takes [p, k], [e, n, k] and [e]");
  }
  const Problem given{static_cast<Form>(form),
                      static_cast<const char*>(x.untyped_data()),
                      static_cast<const char*>(kernels.untyped_data()),
                      y->typed_data(),
                      packed->typed_data(),
                      rows[1] * (form == kFloat32 ? 4 : 2),
                      room[1],
                      held[1]};
  const int64_t most = std::max<int64_t>(kRowBytes / std::max<int64_t>(given.bytes * kTile, 1), 1) * kTile;
  const auto groups = groups_of(ends.typed_data(), held[0], rows[0], most);
  const Group last = groups.empty() ? Group{} : groups.back();
  const bool fits = given.words % 16 == 0 && given.words * 4 >= given.bytes && last.tile + last.tiles() <= room[0];
  if (form == kBfloat16Tiles && !fits) {
    return ffi::Error::InvalidArgument("the grouped product has too little room to pack its rows");
  }
  const int64_t count = last.first + last.rows;
  std::memset(given.y + count * given.outputs, 0, (rows[0] - count) * given.outputs * sizeof(float));
  if (!groups.empty() && given.outputs) compute(pool, given, groups);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_grouped, grouped,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int32_t>("form")
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::U32>>());

// Which forms this process may use: bit n of form n. Asks the kernel for the tiles' registers, once for all threads.
extern "C" int jaxserve_forms() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  int forms = 1 << kFloat32;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1u << 5) forms |= 1 << kBfloat16;
  const bool tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & 1u << 22 && d & 1u << 24;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (tiles && syscall(SYS_arch_prctl, kRequest, kTileData) == 0) forms |= 1 << kBfloat16Tiles;
  return forms;
}
