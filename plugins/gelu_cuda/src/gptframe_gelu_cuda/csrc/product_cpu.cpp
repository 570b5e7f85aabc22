// The CPU implementation of gptframe_product: threads over blocks of rows, on torch's stable ABI.
#include "product_kernels.h"
#include "gelu_torch.h"

namespace {

using gelu::ScalarType;
using gelu::Tensor;

Tensor checked(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(product::available(), "product: this processor has no AMX with bfloat16");
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::BFloat16, "product: ", what,
                  " must be bfloat16 and on the CPU");
  STD_TORCH_CHECK(t.dim() == 2 && t.size(1) < (1 << 30), "product: ", what, " must be a matrix of fewer than 2^30 columns");
  return t.stride(1) == 1 ? t : torch::stable::contiguous(t);
}

product::Matrix rows_from(const Tensor& t, int64_t row) {
  return {(const uint16_t*)t.const_data_ptr() + row * t.stride(0), (long)t.stride(0)};
}

// grad[K,M]^T x[K,N] and the sums of grad's columns, [M], in float32.
std::tuple<Tensor, Tensor> weight_gradient(const Tensor& grad_, const Tensor& x_) {
  const Tensor grad = checked(grad_, "the gradient"), x = checked(x_, "x");
  STD_TORCH_CHECK(grad.size(0) == x.size(0), "product: the gradient has ", grad.size(0), " rows and x ", x.size(0));
  Tensor out = torch::stable::new_empty(grad, {grad.size(1), x.size(1)}, ScalarType::Float);
  Tensor sums = torch::stable::new_empty(grad, {grad.size(1)}, ScalarType::Float);
#ifdef PRODUCT_X86
  if (out.size(0) == 0) return {out, sums};
  const int threads = std::max(1, (int)torch::stable::get_num_threads());
  const auto parallel = [](long n, const auto& work) {
    torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) { work(begin, end); });
  };
  const int64_t depth = grad.size(0), parts = std::max<int64_t>(1, (depth + product::kDeepest - 1) / product::kDeepest);
  const int64_t size = std::max<int64_t>(1, (depth + parts - 1) / parts);
  for (int64_t at = 0; at == 0 || at < depth; at += size)
    product::weight_gradient((int)grad.size(1), (int)x.size(1), (int)std::min(size, depth - at), rows_from(grad, at),
                             rows_from(x, at), (float*)out.mutable_data_ptr(), (float*)sums.mutable_data_ptr(), at > 0,
                             threads, parallel);
#endif
  return {out, sums};
}

}  // namespace

// The name of the variant in use, or "none"; for logs and tests.
extern "C" __attribute__((visibility("default"))) const char* gptframe_product_cpu_variant() {
  return product::available() ? "amx" : "none";
}

STABLE_TORCH_LIBRARY_IMPL(gptframe_product, CPU, m) { m.impl("weight_gradient", TORCH_BOX(&weight_gradient)); }
