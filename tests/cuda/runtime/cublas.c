/* As much of cuBLAS as a float32 `nn.Linear` needs, preloaded too, since the real library finds no driver. The product
   is real (and slow): what a model gives after its weights went and came back can be compared with what it gave before.
   The header needs others that no wheel has, so the few types are declared here. */

#include "standin.h"

#include <driver_types.h>

typedef void *cublasHandle_t;
typedef int cublasMath_t;
typedef enum { CUBLAS_STATUS_SUCCESS = 0 } cublasStatus_t;
typedef enum { CUBLAS_OP_N = 0 } cublasOperation_t; /* anything else is transposed: these numbers are real */

static int something; /* a handle points to it */

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    *handle = &something;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    (void)handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    (void)handle, (void)stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *workspace, size_t bytes) {
    (void)handle, (void)workspace, (void)bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    (void)handle, (void)mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
    (void)handle;
    *mode = 0;
    return CUBLAS_STATUS_SUCCESS;
}

/* C = alpha op(A) op(B) + beta C, columns first. C is not read where beta is 0: it may hold anything. */
cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t transpose_a, cublasOperation_t transpose_b,
                              int m, int n, int k, const float *alpha, const float *a, int lda, const float *b, int ldb,
                              const float *beta, float *c, int ldc) {
    (void)handle;
    size_t a_row = transpose_a == CUBLAS_OP_N ? 1 : lda, a_column = transpose_a == CUBLAS_OP_N ? lda : 1;
    size_t b_row = transpose_b == CUBLAS_OP_N ? 1 : ldb, b_column = transpose_b == CUBLAS_OP_N ? ldb : 1;
    for (int column = 0; column < n; column++) {
        for (int row = 0; row < m; row++) {
            float sum = 0, *out = c + (size_t)column * ldc + row;
            for (int i = 0; i < k; i++) sum += a[row * a_row + i * a_column] * b[i * b_row + column * b_column];
            *out = *alpha * sum + (*beta == 0 ? 0 : *beta * *out);
        }
    }
    standin_counted(STANDIN_LAUNCHES);
    return CUBLAS_STATUS_SUCCESS;
}
