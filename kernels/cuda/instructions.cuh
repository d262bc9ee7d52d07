// Instructions that C++ has no word for, a function each, in PTX, the assembler of NVIDIA GPUs.
//
// Invariant: a function is one instruction (two where it also waits for the other lanes). Its cost
// is that of the instruction. From sm_80 on; "Parallel Thread Execution ISA", NVIDIA.
//
// Matrices of 2-byte elements are spread over the lanes of a warp, two neighbours in a register. Of
// 8 x 8 elements, lane l holds row l / 4, columns 2 (l % 4) and the next:
//
//   row 0   lane 0  0  1  1  2  2  3  3
//   row 1   lane 4  4  5  5  6  6  7  7
//   ...
//   row 7   lane 28 28 ...        31 31

#pragma once

constexpr int LANES = 32;             // threads of a warp: they issue an instruction together
constexpr unsigned ALL = 0xffffffff;  // all lanes take part

enum Type { FLOAT16, BFLOAT16 };
using Half = unsigned short;  // 16 bits of either type

// Start a copy of 16 bytes into shared memory, past the registers; zeros unless `real`.
__device__ inline void copy_async(unsigned to, const Half* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(real ? 16 : 0)
               : "memory");
}

// The copies that this thread started since the last call are a group.
__device__ inline void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most PENDING of this thread's groups are on their way, then for the other lanes.
template <int PENDING>
__device__ inline void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
  __syncwarp();
}

// Four 8 x 8 matrices: lane l gives the address of row l % 8 of matrix l / 8, and gets its share of
// each matrix as above; of its transpose, if TRANSPOSED.
template <bool TRANSPOSED>
__device__ inline void load_matrices(unsigned (&to)[4], unsigned from) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// An 8 x 8 matrix, spread over the lanes as above, transposed without a trip to memory.
__device__ inline unsigned transpose(unsigned matrix) {
  unsigned to;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(matrix));
  return to;
}

// sum += a b, for 16 x 16 numbers a and 16 x 8 numbers b; sum is float32.
template <Type TYPE>
__device__ inline void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (TYPE == BFLOAT16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two float32, rounded, in one register: `low` in the lower half.
template <Type TYPE>
__device__ inline unsigned pack(float low, float high) {
  unsigned to;
  if constexpr (TYPE == BFLOAT16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(to) : "f"(high), "f"(low));
  return to;
}
