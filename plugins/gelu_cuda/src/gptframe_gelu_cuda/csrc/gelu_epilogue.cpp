// The two matrix products of an MLP that cuBLASLt can fuse with GELU: up projection + bias + GELU, and the gradient
// through both with the bias gradient. Compiled only on request; see docs/compiled-plugins.md.
#include "gelu_epilogue_plan.h"
#include "gelu_torch.h"

#include <cublasLt.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace {

using gelu::ScalarType;
using gelu::Tensor;

void check(cublasStatus_t status, const char* what) {
  STD_TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt ", what, ": ", cublasLtGetStatusString(status));
}

struct Layout {
  cublasLtMatrixLayout_t it = nullptr;
  Layout(cudaDataType_t type, const gelu::Matrix& m) {
    check(cublasLtMatrixLayoutCreate(&it, type, (uint64_t)m.rows, (uint64_t)m.columns, m.leading), "layout");
  }
  ~Layout() { cublasLtMatrixLayoutDestroy(it); }
  Layout(const Layout&) = delete;
};

struct Description {
  cublasLtMatmulDesc_t it = nullptr;
  Description() { check(cublasLtMatmulDescCreate(&it, CUBLAS_COMPUTE_32F, CUDA_R_32F), "description"); }
  ~Description() { cublasLtMatmulDescDestroy(it); }
  Description(const Description&) = delete;
  template <class T>
  void set(cublasLtMatmulDescAttributes_t what, T value) {
    check(cublasLtMatmulDescSetAttribute(it, what, &value, sizeof(T)), "attribute");
  }
};

cublasLtHandle_t handle(int device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& it = handles[device];
  if (!it) check(cublasLtCreate(&it), "handle");
  return it;
}

// d = op(a)*op(b) with the plan's epilogue; `vector` is the bias, or receives its gradient; `aux` the GELU's input.
void multiply(const gelu::Plan& plan, const Tensor& a, const Tensor& b, void* vector, void* aux, Tensor& d) {
  constexpr uint32_t kAlignment = 16;
  for (const void* p : {a.const_data_ptr(), b.const_data_ptr(), (const void*)vector, (const void*)aux})
    STD_TORCH_CHECK((uintptr_t)p % kAlignment == 0, "cuBLASLt: a tensor is not aligned to 16 bytes");
  const int device = a.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const auto stream = (cudaStream_t)torch::stable::accelerator::getCurrentStream(device).nativeHandle();
  const cudaDataType_t type = a.scalar_type() == ScalarType::Half ? CUDA_R_16F : CUDA_R_16BF;
  Description description;
  description.set(CUBLASLT_MATMUL_DESC_TRANSA, plan.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  description.set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  description.set(CUBLASLT_MATMUL_DESC_EPILOGUE,
                  plan.backward ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
  description.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector);
  description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
  description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)plan.d.leading);
  const Layout la(type, plan.a), lb(type, plan.b), ld(type, plan.d);

  constexpr int64_t kWorkspace = 32 << 20;  // what NVIDIA recommends from Hopper on
  Tensor workspace = torch::stable::new_empty(a, {kWorkspace}, ScalarType::Byte);
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "preference");
  const size_t size = kWorkspace;
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(
      preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &size, sizeof(size));
  // Without these the heuristic assumes 256 bytes, and may choose what slices of a tensor do not have.
  for (const auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                           CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    if (status == CUBLAS_STATUS_SUCCESS)
      status = cublasLtMatmulPreferenceSetAttribute(preference, which, &kAlignment, sizeof(kAlignment));
  if (status == CUBLAS_STATUS_SUCCESS)
    status = cublasLtMatmulAlgoGetHeuristic(handle(device), description.it, la.it, lb.it, ld.it, ld.it, preference, 1,
                                            &found, &count);
  cublasLtMatmulPreferenceDestroy(preference);
  check(status, "heuristic");
  STD_TORCH_CHECK(count > 0, "cuBLASLt has no algorithm with this epilogue for these shapes");
  const float one = 1, zero = 0;
  check(cublasLtMatmul(handle(device), description.it, &one, a.const_data_ptr(), la.it, b.const_data_ptr(), lb.it,
                       &zero, d.mutable_data_ptr(), ld.it, d.mutable_data_ptr(), ld.it, &found.algo,
                       workspace.mutable_data_ptr(), size, stream),
        "product");
}

// x [rows, width], weight [hidden, width], bias [hidden] -> gelu(x weight^T + bias) and the GELU's input, [rows, hidden]
std::tuple<Tensor, Tensor> linear_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const gelu::Plan plan = gelu::forward_plan(x.size(0), weight.size(0), x.size(1));
  Tensor y = torch::stable::new_empty(x, {x.size(0), weight.size(0)});
  Tensor aux = torch::stable::empty_like(y);
  multiply(plan, weight, x, (void*)bias.const_data_ptr(), aux.mutable_data_ptr(), y);
  return {y, aux};
}

// grad [rows, width], weight [width, hidden], aux [rows, hidden]
// -> (grad weight) * gelu'(aux) [rows, hidden], and its column sums [hidden]
std::tuple<Tensor, Tensor> linear_dgelu(const Tensor& grad, const Tensor& weight, const Tensor& aux) {
  const gelu::Plan plan = gelu::backward_plan(grad.size(0), weight.size(1), grad.size(1));
  Tensor dh = torch::stable::empty_like(aux);
  Tensor db = torch::stable::new_empty(aux, {weight.size(1)});
  multiply(plan, weight, grad, db.mutable_data_ptr(), (void*)aux.const_data_ptr(), dh);
  return {dh, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gptframe_gelu, CUDA, m) {
  m.impl("linear_gelu", TORCH_BOX(&linear_gelu));
  m.impl("linear_dgelu", TORCH_BOX(&linear_dgelu));
}
