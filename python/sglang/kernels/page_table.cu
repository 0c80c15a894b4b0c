// The numbers of the pages that requests read, from the table of their slots. pdl.cuh is put in front of it.
struct PagesParams {
  const int *table;       // [rows, stride], slots
  const long long *rows;  // [requests], of the table
  const long long *first; // [requests], of a request's pages the first that is listed
  const long long *begin; // [requests + 1], where a request's list begins in out
  int *out;               // [begin[requests]]
  long long stride;
  int page_size;          // slots of a page
};

extern "C" __global__ void __launch_bounds__(256) list_pages(const __grid_constant__ PagesParams p) { // blockIdx.x: the request
  begin_next_kernel();
  wait_for_previous_kernel();
  const int request = blockIdx.x;
  const int *const slots = p.table + p.rows[request] * p.stride + p.first[request] * p.page_size;
  const long long begin = p.begin[request], n = p.begin[request + 1] - begin;
  for (long long i = blockIdx.y * blockDim.x + threadIdx.x; i < n; i += gridDim.y * blockDim.x)
    p.out[begin + i] = slots[i * p.page_size] / p.page_size;
}
