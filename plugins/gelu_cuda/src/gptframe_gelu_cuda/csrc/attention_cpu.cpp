// The CPU implementation of the gptframe_attention operators: threads over the heads, on torch's stable ABI.
#include "attention_kernels.h"
#include "gelu_torch.h"

namespace {

using namespace attention;
using gelu::ScalarType;
using gelu::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Queries and keys in a block. The forward computes no more keys than the last query of a block sees, so few queries save
// work; many keys rescale less often. The backward has five products to keep in cache, and AMX sums few terms at a loss.
struct Block {
  int rows, columns;
};
bool uses_tiles(const Tensor& q) { return variant()->tiles && q.scalar_type() == ScalarType::BFloat16; }
Block forward_block(const Tensor& q) { return {32, uses_tiles(q) ? 256 : 128}; }
Block backward_block(const Tensor& q) { return {uses_tiles(q) ? 128 : 64, 64}; }

Problem problem(const Tensor& q, const Tensor& k, const MaybeTensor& first, int64_t window, Block block) {
  Problem p{};
  p.B = (int)q.size(0), p.H = (int)q.size(1), p.T = (int)q.size(2), p.D = (int)q.size(3), p.Hk = (int)k.size(1);
  p.window = window < p.T ? (int)window : 0;
  p.first = first ? (const int32_t*)first->const_data_ptr() : nullptr;
  p.natural = 1 / std::sqrt((float)p.D);
  p.scale = p.natural * 1.44269504f;
  const int small = (p.T + 31) / 32 * 32;  // AMX multiplies 16 pairs at once
  p.rows = small < block.rows ? small : block.rows;
  p.columns = small < block.columns ? small : block.columns;
  return p;
}

template <class S>
Strided<S> strided(const Tensor& t) {
  return {(const S*)t.const_data_ptr(), (long)t.stride(0), (long)t.stride(1), (long)t.stride(2)};
}

// [B, T, H, D] in memory, seen as [B, H, T, D].
Tensor token_major(const Tensor& like, int64_t B, int64_t H, int64_t T, int64_t D) {
  return torch::stable::transpose(torch::stable::new_empty(like, {B, T, H, D}), 1, 2);
}

template <class Work>
void each(const Problem& p, const Work& work) {
  const bool with_tiles = variant()->tiles;
  torch::stable::parallel_for(0, (int64_t)p.B * p.Hk, 1, [&](int64_t begin, int64_t end) {
    Arena arena;
    if (with_tiles) tiles::begin();
    for (int64_t task = begin; task < end; ++task) {
      arena.reset();
      work((int)task, arena);
    }
    if (with_tiles) tiles::end();
  });
}

Tensor side_by_side(const Tensor& t) { return t.stride(3) == 1 ? t : gelu::contiguous(t); }

void check(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& first, int64_t window) {
  STD_TORCH_CHECK(variant() != nullptr, "attention: this processor has no AVX2, or no variant of the name that "
                                        "GPTFRAME_ATTENTION_CPU gives");
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "attention: q, k and v must be [B, H, T, D]");
  const ScalarType type = q.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "attention: float32 or bfloat16");
  STD_TORCH_CHECK(k.scalar_type() == type && v.scalar_type() == type, "attention: q, k and v need one dtype");
  STD_TORCH_CHECK(q.is_cpu() && k.is_cpu() && v.is_cpu(), "attention: q, k and v must be on the CPU");
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(k.size(i) == v.size(i), "attention: k and v have different shapes");
    STD_TORCH_CHECK(i == 1 || q.size(i) == k.size(i), "attention: q and k have different shapes");
  }
  STD_TORCH_CHECK(k.size(1) > 0 && q.size(1) > 0 && q.size(1) % k.size(1) == 0,
                  "attention: heads of q are no multiple of those of k");
  STD_TORCH_CHECK(q.size(3) > 0 && q.size(3) % 16 == 0, "attention: D must be a multiple of 16");
  STD_TORCH_CHECK(window >= 0, "attention: window must be at least 1, or 0 for all keys");
  if (!first) return;
  STD_TORCH_CHECK(first->is_cpu() && first->is_contiguous() && first->scalar_type() == ScalarType::Int &&
                      first->dim() == 2 && first->size(0) == q.size(0) && first->size(1) == q.size(2),
                  "attention: first must be int32 [B, T], contiguous");
  const int32_t* keys = (const int32_t*)first->const_data_ptr();
  bool within = true;
  for (int64_t b = 0; b < first->size(0); ++b)
    for (int64_t t = 0; t < first->size(1); ++t, ++keys) within &= 0 <= *keys && *keys <= t;
  STD_TORCH_CHECK(within, "attention: first must be from 0 up to the query's own position");
}

template <class S>
void forward_of(const Loops<S>& loops, const Problem& p, const Tensor& q, const Tensor& k, const Tensor& v,
                const Tensor& out, const Tensor& lse) {
  const Strided<S> in[3] = {strided<S>(q), strided<S>(k), strided<S>(v)};
  S* to = (S*)out.mutable_data_ptr();
  float* base = (float*)lse.mutable_data_ptr();
  each(p, [&](int task, Arena& arena) { loops.forward(p, in, to, base, task, arena); });
}

std::tuple<Tensor, Tensor> forward(const Tensor& q_, const Tensor& k_, const Tensor& v_, const MaybeTensor& first,
                                   int64_t window) {
  check(q_, k_, v_, first, window);
  const Tensor q = side_by_side(q_), k = side_by_side(k_), v = side_by_side(v_);
  Tensor out = token_major(q, q.size(0), q.size(1), q.size(2), q.size(3));
  Tensor lse = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
  const Problem p = problem(q, k, first, window, forward_block(q));
  if (q.numel() == 0) return {out, lse};
  if (q.scalar_type() == ScalarType::Float)
    forward_of(variant()->single, p, q, k, v, out, lse);
  else
    forward_of(variant()->half, p, q, k, v, out, lse);
  return {out, lse};
}

template <class S>
void backward_of(const Loops<S>& loops, const Problem& p, const Tensor& g, const Tensor& q, const Tensor& k,
                 const Tensor& v, const Tensor& out, const Tensor& lse, const Tensor* results) {
  const Strided<S> in[3] = {strided<S>(q), strided<S>(k), strided<S>(v)};
  const Strided<S> of_out = strided<S>(out), of_grad = strided<S>(g);
  S* to[3];
  for (int i = 0; i < 3; ++i) to[i] = (S*)results[i].mutable_data_ptr();
  const float* base = (const float*)lse.const_data_ptr();
  each(p, [&](int task, Arena& arena) { loops.backward(p, in, of_out, of_grad, base, to, task, arena); });
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& g_, const Tensor& q_, const Tensor& k_, const Tensor& v_,
                                            const Tensor& out_, const Tensor& lse, const MaybeTensor& first,
                                            int64_t window) {
  check(q_, k_, v_, first, window);
  const Tensor g = side_by_side(g_), q = side_by_side(q_), k = side_by_side(k_), v = side_by_side(v_);
  const Tensor out = side_by_side(out_);
  for (const Tensor* t : {&g, &out}) {
    STD_TORCH_CHECK(t->scalar_type() == q.scalar_type() && t->dim() == 4, "attention: the gradient must be like q");
    for (int i = 0; i < 4; ++i) STD_TORCH_CHECK(t->size(i) == q.size(i), "attention: the gradient must be like q");
  }
  STD_TORCH_CHECK(g.is_cpu() && out.is_cpu() && lse.is_cpu() && lse.is_contiguous() &&
                      lse.numel() * q.size(3) == q.numel() && lse.scalar_type() == ScalarType::Float,
                  "attention: lse must be what the forward pass gave");
  const int64_t B = q.size(0), T = q.size(2), D = q.size(3);
  Tensor results[3] = {token_major(q, B, q.size(1), T, D), token_major(q, B, k.size(1), T, D),
                       token_major(q, B, k.size(1), T, D)};
  const Problem p = problem(q, k, first, window, backward_block(q));
  if (q.numel() > 0) {
    if (q.scalar_type() == ScalarType::Float)
      backward_of(variant()->single, p, g, q, k, v, out, lse, results);
    else
      backward_of(variant()->half, p, g, q, k, v, out, lse, results);
  }
  return {results[0], results[1], results[2]};
}

}  // namespace

// The name of the variant in use, or "none"; for logs and tests.
extern "C" __attribute__((visibility("default"))) const char* gptframe_attention_cpu_variant() {
  return variant() ? variant()->name : "none";
}

STABLE_TORCH_LIBRARY_IMPL(gptframe_attention, CPU, m) {
  m.impl("attention", TORCH_BOX(&forward));
  m.impl("attention_backward", TORCH_BOX(&backward));
}
