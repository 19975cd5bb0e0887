/* rudnn_vulkan_device: opening a Vulkan device, and its memory; the first half of rudnn_vulkan.h. */
#ifndef RUDNN_VULKAN_DEVICE_H
#define RUDNN_VULKAN_DEVICE_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vulkan.h>

#include "rudnn_device.h"

#define RUDNN_RING 16        /* launches in flight before the host waits for the oldest */
#define RUDNN_MOST_BUFFERS 32
#define RUDNN_MOST_BYTES 1024 /* of numbers */

/* `file` is the SPIR-V, with the entry point main. The numbers are: for each of `buffers` buffers
 * the element at which its data begins (uint32), then the kernel's own, each aligned to its size.
 * They are push constants, or one buffer more if `in_buffer`. `elements` are the bytes of an
 * element of each buffer, 0 for a part of the workspace, which is bound where it begins. `subgroup`
 * is the size that subgroups must have, 0 if any. */
struct rudnn_function {
    const char *file;
    int32_t buffers;
    const char *elements;
    int32_t bytes;
    int32_t in_buffer;
    int32_t subgroup;
};

typedef struct rudnn_memory {
    int64_t address, bytes;
    VkBuffer buffer;
    VkDeviceMemory memory;
    struct rudnn_memory *next;
} rudnn_memory;

struct rudnn_device {
    VkInstance instance;
    VkPhysicalDevice physical;
    VkDevice device;
    VkQueue queue;
    VkCommandPool pool;
    VkCommandBuffer commands[RUDNN_RING];
    VkFence fences[RUDNN_RING];
    rudnn_memory *numbers[RUDNN_RING]; /* those of kernels that take them in a buffer */
    int next;
    rudnn_memory *memory, *scratch;
    int64_t free_address;
    PFN_vkCmdPushDescriptorSetKHR push;
};

typedef struct {
    VkDescriptorSetLayout set;
    VkPipelineLayout layout;
    VkPipeline pipeline;
} rudnn_pipeline;

struct rudnn_module {
    const rudnn_function *functions;
    rudnn_pipeline *pipelines;
    int count;
};

static char rudnn_error[512];

static inline const char *rudnn_last_error(void) { return rudnn_error; }

/* `status`, with a text if it is a failure. */
static inline int32_t rudnn_failed(int32_t status, const char *format, ...) {
    va_list list;
    size_t used;
    if (status >= 0) return RUDNN_OK;
    va_start(list, format);
    vsnprintf(rudnn_error, sizeof rudnn_error, format, list);
    va_end(list);
    used = strlen(rudnn_error);
    snprintf(rudnn_error + used, sizeof rudnn_error - used, " failed: VkResult %d", (int)status);
    return status;
}

/* --- opening --- */

/* Device number `index`, those that are no processors first. */
static inline int32_t rudnn_choose(rudnn_device *d, int index) {
    VkPhysicalDevice found[32];
    VkPhysicalDeviceProperties facts;
    uint32_t count = 32, i;
    int software, seen = 0;
    int32_t status = vkEnumeratePhysicalDevices(d->instance, &count, found);
    if (status < 0) return rudnn_failed(status, "listing devices");
    for (software = 0; software < 2; ++software)
        for (i = 0; i < count; ++i) {
            vkGetPhysicalDeviceProperties(found[i], &facts);
            if ((facts.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU) != software) continue;
            if (seen++ == index) d->physical = found[i];
        }
    if (d->physical) return RUDNN_OK;
    return rudnn_failed(VK_ERROR_INITIALIZATION_FAILED, "finding device %d", index);
}

static inline int rudnn_has(rudnn_device *d, const char *name) {
    VkExtensionProperties *list;
    uint32_t count = 0, i;
    int there = 0;
    vkEnumerateDeviceExtensionProperties(d->physical, NULL, &count, NULL);
    list = (VkExtensionProperties *)calloc(count + 1, sizeof *list);
    if (!list) return 0;
    vkEnumerateDeviceExtensionProperties(d->physical, NULL, &count, list);
    for (i = 0; i < count; ++i) there |= strcmp(list[i].extensionName, name) == 0;
    free(list);
    return there;
}

/* A VkDevice with every feature that a kernel may use and that is there. */
static inline int32_t rudnn_make_device(rudnn_device *d, uint32_t family) {
    static const char *const optional[] = {
        "VK_EXT_subgroup_size_control", "VK_EXT_shader_atomic_float", "VK_KHR_cooperative_matrix",
        "VK_KHR_portability_subset"};
    const char *names[8] = {"VK_KHR_push_descriptor"};
    float priority = 1;
    int i;
    VkPhysicalDeviceFeatures2 all;
    VkPhysicalDeviceFeatures core;
    VkPhysicalDeviceVulkan11Features v11;
    VkPhysicalDeviceVulkan12Features v12, use;
    VkPhysicalDeviceSubgroupSizeControlFeatures subgroups;
    VkPhysicalDeviceShaderAtomicFloatFeaturesEXT atomics;
    VkDeviceQueueCreateInfo queue;
    VkDeviceCreateInfo info;
#ifdef VK_KHR_cooperative_matrix
    VkPhysicalDeviceCooperativeMatrixFeaturesKHR matrix;
    memset(&matrix, 0, sizeof matrix);
    matrix.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR;
#endif
    memset(&all, 0, sizeof all);
    memset(&core, 0, sizeof core);
    memset(&v11, 0, sizeof v11);
    memset(&v12, 0, sizeof v12);
    memset(&subgroups, 0, sizeof subgroups);
    memset(&atomics, 0, sizeof atomics);
    memset(&queue, 0, sizeof queue);
    memset(&info, 0, sizeof info);
    all.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
    v11.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES;
    v12.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES;
    subgroups.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_FEATURES;
    atomics.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_ATOMIC_FLOAT_FEATURES_EXT;
    all.pNext = &v11;
    v11.pNext = &v12;
    info.enabledExtensionCount = 1;
    for (i = 0; i < 4; ++i) {
        if (!rudnn_has(d, optional[i])) continue;
        names[info.enabledExtensionCount++] = optional[i];
        if (i == 0) subgroups.pNext = v12.pNext, v12.pNext = &subgroups;
        if (i == 1) atomics.pNext = v12.pNext, v12.pNext = &atomics;
#ifdef VK_KHR_cooperative_matrix
        if (i == 2) matrix.pNext = v12.pNext, v12.pNext = &matrix;
#endif
    }
    vkGetPhysicalDeviceFeatures2(d->physical, &all);
    core.robustBufferAccess = all.features.robustBufferAccess;
    core.shaderInt64 = all.features.shaderInt64;
    core.shaderInt16 = all.features.shaderInt16;
    all.features = core;
    memset(&use, 0, sizeof use);
    use.sType = v12.sType;
    use.pNext = v12.pNext;
    use.storageBuffer8BitAccess = v12.storageBuffer8BitAccess;
    use.shaderFloat16 = v12.shaderFloat16;
    use.shaderInt8 = v12.shaderInt8;
    use.shaderSubgroupExtendedTypes = v12.shaderSubgroupExtendedTypes;
    use.vulkanMemoryModel = v12.vulkanMemoryModel;
    v12 = use;
    i = (int)v11.storageBuffer16BitAccess;
    memset(&v11, 0, sizeof v11);
    v11.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES;
    v11.pNext = &v12;
    v11.storageBuffer16BitAccess = (VkBool32)i;
    queue.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
    queue.queueFamilyIndex = family;
    queue.queueCount = 1;
    queue.pQueuePriorities = &priority;
    info.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
    info.pNext = &all;
    info.queueCreateInfoCount = 1;
    info.pQueueCreateInfos = &queue;
    info.ppEnabledExtensionNames = names;
    return rudnn_failed(vkCreateDevice(d->physical, &info, NULL, &d->device), "opening a device");
}

static inline uint32_t rudnn_family(rudnn_device *d) {
    VkQueueFamilyProperties list[16];
    uint32_t count = 16, i;
    vkGetPhysicalDeviceQueueFamilyProperties(d->physical, &count, list);
    for (i = 0; i < count && !(list[i].queueFlags & VK_QUEUE_COMPUTE_BIT); ++i) {}
    return i;
}

static inline int32_t rudnn_make_commands(rudnn_device *d, uint32_t family) {
    VkCommandPoolCreateInfo pool = {VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO, NULL,
                                    VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT, family};
    VkFenceCreateInfo fence = {VK_STRUCTURE_TYPE_FENCE_CREATE_INFO, NULL,
                               VK_FENCE_CREATE_SIGNALED_BIT};
    VkCommandBufferAllocateInfo info = {VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO, NULL,
                                        VK_NULL_HANDLE, VK_COMMAND_BUFFER_LEVEL_PRIMARY,
                                        RUDNN_RING};
    int i;
    int32_t status = vkCreateCommandPool(d->device, &pool, NULL, &d->pool);
    info.commandPool = d->pool;
    if (status >= 0) status = vkAllocateCommandBuffers(d->device, &info, d->commands);
    for (i = 0; i < RUDNN_RING && status >= 0; ++i)
        status = vkCreateFence(d->device, &fence, NULL, &d->fences[i]);
    return rudnn_failed(status, "making command buffers");
}

static inline int32_t rudnn_open(int index, rudnn_device **made) {
    VkApplicationInfo app;
    VkInstanceCreateInfo info;
    rudnn_device *d = (rudnn_device *)calloc(1, sizeof *d);
    uint32_t family = 0;
    int32_t status;
    *made = d;
    if (!d) return RUDNN_NO_MEMORY;
    memset(&app, 0, sizeof app);
    memset(&info, 0, sizeof info);
    app.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
    app.apiVersion = VK_API_VERSION_1_2;
    info.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
    info.pApplicationInfo = &app;
    d->free_address = INT64_C(1) << 40;
    status = rudnn_failed(vkCreateInstance(&info, NULL, &d->instance), "starting Vulkan");
    if (!status) status = rudnn_choose(d, index);
    if (!status) status = rudnn_make_device(d, family = rudnn_family(d));
    if (!status) status = rudnn_make_commands(d, family);
    if (status) {
        rudnn_close(d);
        *made = NULL;
        return status;
    }
    vkGetDeviceQueue(d->device, family, 0, &d->queue);
    d->push = (PFN_vkCmdPushDescriptorSetKHR)vkGetDeviceProcAddr(d->device,
                                                                 "vkCmdPushDescriptorSetKHR");
    return RUDNN_OK;
}

static inline int32_t rudnn_wait(rudnn_device *d) {
    return rudnn_failed(vkQueueWaitIdle(d->queue), "waiting for the device");
}

/* --- memory --- */

static inline int32_t rudnn_buffer_of(rudnn_device *d, int64_t bytes, VkMemoryPropertyFlags kind,
                                      rudnn_memory *made) {
    VkBufferCreateInfo info;
    VkMemoryAllocateInfo want = {VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, NULL, 0, 0};
    VkMemoryRequirements needs;
    VkPhysicalDeviceMemoryProperties table;
    int32_t status;
    memset(&info, 0, sizeof info);
    info.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
    info.size = (VkDeviceSize)(bytes > 0 ? (bytes + 15) / 16 * 16 : 16);
    info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                 VK_BUFFER_USAGE_TRANSFER_DST_BIT;
    status = vkCreateBuffer(d->device, &info, NULL, &made->buffer);
    if (status < 0) return rudnn_failed(status, "making a buffer");
    vkGetBufferMemoryRequirements(d->device, made->buffer, &needs);
    vkGetPhysicalDeviceMemoryProperties(d->physical, &table);
    while (want.memoryTypeIndex < table.memoryTypeCount &&
           (!(needs.memoryTypeBits >> want.memoryTypeIndex & 1) ||
            (table.memoryTypes[want.memoryTypeIndex].propertyFlags & kind) != kind))
        ++want.memoryTypeIndex;
    want.allocationSize = needs.size;
    made->bytes = bytes;
    status = VK_ERROR_OUT_OF_DEVICE_MEMORY;
    if (want.memoryTypeIndex < table.memoryTypeCount)
        status = vkAllocateMemory(d->device, &want, NULL, &made->memory);
    if (status >= 0) status = vkBindBufferMemory(d->device, made->buffer, made->memory, 0);
    return rudnn_failed(status, "allocating %lld bytes", (long long)bytes);
}

static inline void rudnn_drop(rudnn_device *d, rudnn_memory *memory) {
    if (!memory) return;
    vkDestroyBuffer(d->device, memory->buffer, NULL);
    vkFreeMemory(d->device, memory->memory, NULL);
    free(memory);
}

static inline int32_t rudnn_new_memory(rudnn_device *d, int64_t bytes, VkMemoryPropertyFlags kind,
                                       rudnn_memory **made) {
    int32_t status;
    *made = (rudnn_memory *)calloc(1, sizeof **made);
    if (!*made) return RUDNN_NO_MEMORY;
    status = rudnn_buffer_of(d, bytes, kind, *made);
    if (!status) return RUDNN_OK;
    rudnn_drop(d, *made);
    *made = NULL;
    return status;
}

static inline int32_t rudnn_alloc(rudnn_device *d, int64_t bytes, void **made) {
    rudnn_memory *memory;
    int32_t status = rudnn_new_memory(d, bytes, VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, &memory);
    *made = NULL;
    if (status) return status;
    memory->address = d->free_address;
    d->free_address += (bytes / 4096 + 2) * 4096;
    memory->next = d->memory;
    d->memory = memory;
    *made = (void *)(intptr_t)memory->address;
    return RUDNN_OK;
}

/* The memory that holds an address; `place` is where in it. */
static inline rudnn_memory *rudnn_find(rudnn_device *d, const void *address, int64_t *place) {
    rudnn_memory *memory = d->memory;
    int64_t at = (int64_t)(intptr_t)address;
    while (memory && (at < memory->address || at > memory->address + memory->bytes))
        memory = memory->next;
    *place = memory ? at - memory->address : 0;
    if (!memory) rudnn_failed(VK_ERROR_UNKNOWN, "finding address %#llx", (unsigned long long)at);
    return memory;
}

/* The VkBuffer of an address, and the byte in it. */
static inline VkBuffer rudnn_buffer(rudnn_device *d, const void *address, int64_t *place) {
    rudnn_memory *memory = rudnn_find(d, address, place);
    return memory ? memory->buffer : VK_NULL_HANDLE;
}

static inline void rudnn_free(rudnn_device *d, void *address) {
    rudnn_memory **at, *memory;
    if (!d || !address) return;
    rudnn_wait(d);
    for (at = &d->memory; (memory = *at) != NULL; at = &memory->next)
        if (memory->address == (int64_t)(intptr_t)address) {
            *at = memory->next;
            rudnn_drop(d, memory);
            return;
        }
}

static inline void *rudnn_scratch(rudnn_device *d, int64_t bytes) {
    void *made;
    if (d->scratch && d->scratch->bytes >= bytes) return (void *)(intptr_t)d->scratch->address;
    if (d->scratch) rudnn_free(d, (void *)(intptr_t)d->scratch->address);
    d->scratch = NULL;
    if (rudnn_alloc(d, bytes, &made)) return NULL;
    d->scratch = d->memory;
    return made;
}

#endif
