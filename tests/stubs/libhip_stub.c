/* The pretended devices of libcuda_stub.c under HIP's names, for libamdhip64.so.
 *
 * HIP has no contexts to push: a thread has a current device, and every call is inside one.
 */
#define STUB_CONTEXTS 0

#define cuInit hipInit
#define cuDeviceGetCount hipGetDeviceCount
#define cuDeviceGet hipDeviceGet
#define cuDeviceGetName hipDeviceGetName
#define cuDeviceGetDefaultMemPool hipDeviceGetDefaultMemPool
#define cuMemPoolSetAttribute hipMemPoolSetAttribute
#define cuCtxSynchronize hipDeviceSynchronize
#define cuModuleLoadData hipModuleLoadData
#define cuModuleGetFunction hipModuleGetFunction
#define cuModuleUnload hipModuleUnload
#define cuLaunchKernel hipModuleLaunchKernel
#define cuStreamCreate hipStreamCreateWithFlags
#define cuStreamDestroy_v2 hipStreamDestroy
#define cuStreamSynchronize hipStreamSynchronize
#define cuStreamBeginCapture_v2 hipStreamBeginCapture
#define cuStreamEndCapture hipStreamEndCapture
#define cuGraphInstantiateWithFlags hipGraphInstantiateWithFlags
#define cuGraphDestroy hipGraphDestroy
#define cuGraphExecDestroy hipGraphExecDestroy
#define cuGraphLaunch hipGraphLaunch
#define cuEventCreate hipEventCreateWithFlags
#define cuEventRecord hipEventRecord
#define cuEventSynchronize hipEventSynchronize
#define cuEventElapsedTime hipEventElapsedTime
#define cuEventDestroy_v2 hipEventDestroy
#define cuMemAllocAsync hipMallocAsync
#define cuMemAlloc_v2 hipMalloc
#define cuMemFreeAsync hipFreeAsync
#define cuMemFree_v2 hipFree
#define cuMemGetInfo_v2 hipMemGetInfo
#define cuMemcpyHtoDAsync_v2 hipMemcpyHtoDAsync
#define cuMemcpyDtoHAsync_v2 hipMemcpyDtoHAsync
#define cuMemcpyDtoDAsync_v2 hipMemcpyDtoDAsync
#define cuMemsetD8Async hipMemsetD8Async

#define STUB_PARAM_END ((void *)3)
#include "libcuda_stub.c"

static __thread int current_device;

int hipGetDevice(int *device) { ENTER(0); *device = current_device; return 0; }
int hipSetDevice(int device) { ENTER(0); current_device = device; return 0; }
const char *hipGetErrorName(int code) { return code == 2 ? "hipErrorOutOfMemory" : "hipErrorSome"; }
const char *hipGetErrorString(int code) { return code == 2 ? "out of memory" : "some error"; }

/* STUB_ARCH is the architecture's name; where it stands differs between versions of HIP. */
int hipGetDevicePropertiesR0600(char *properties, int device) {
    const char *arch = getenv("STUB_ARCH");
    ENTER(0);
    memset(properties, 0, 1472);
    snprintf(properties, 256, "Stub %d", device);
    snprintf(properties + 1160, 256, "%s:sramecc+:xnack-", arch ? arch : "gfx942");
    return 0;
}
