/* rudnn_vulkan: exported operators on Vulkan 1.2 devices. Build with -lvulkan. Plain C99 and C++.
 *
 * Implements rudnn_device.h. Memory of the device has addresses of our own, from 2^40 on, on which
 * one may count as on pointers, but which the host cannot follow: rudnn_buffer() tells the VkBuffer
 * behind one. An app with a VkDevice of its own needs little more than rudnn_launch(): the
 * manifest tells the same in words.
 */
#ifndef RUDNN_VULKAN_H
#define RUDNN_VULKAN_H

#include "rudnn_vulkan_device.h"

/* --- commands --- */

/* Record into command buffer number `*slot`, once what it was last used for is done. */
static inline int32_t rudnn_begin(rudnn_device *d, int *slot, VkCommandBuffer *commands) {
    VkCommandBufferBeginInfo info = {VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO, NULL,
                                     VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT, NULL};
    int32_t status;
    *slot = d->next;
    *commands = d->commands[*slot];
    status = vkWaitForFences(d->device, 1, &d->fences[*slot], VK_TRUE, UINT64_MAX);
    if (status >= 0) {
        rudnn_drop(d, d->numbers[*slot]);
        d->numbers[*slot] = NULL;
        status = vkBeginCommandBuffer(*commands, &info);
    }
    return rudnn_failed(status, "recording");
}

/* Submit; all that follows waits for it and sees what it wrote. */
static inline int32_t rudnn_end(rudnn_device *d, int slot) {
    VkMemoryBarrier after = {VK_STRUCTURE_TYPE_MEMORY_BARRIER, NULL, VK_ACCESS_MEMORY_WRITE_BIT,
                             VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT};
    VkSubmitInfo info;
    int32_t status;
    vkCmdPipelineBarrier(d->commands[slot], VK_PIPELINE_STAGE_ALL_COMMANDS_BIT,
                         VK_PIPELINE_STAGE_ALL_COMMANDS_BIT | VK_PIPELINE_STAGE_HOST_BIT, 0, 1,
                         &after, 0, NULL, 0, NULL);
    memset(&info, 0, sizeof info);
    info.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO;
    info.commandBufferCount = 1;
    info.pCommandBuffers = &d->commands[slot];
    status = vkEndCommandBuffer(d->commands[slot]);
    if (status >= 0) status = vkResetFences(d->device, 1, &d->fences[slot]);
    if (status >= 0) status = vkQueueSubmit(d->queue, 1, &info, d->fences[slot]);
    d->next = (slot + 1) % RUDNN_RING;
    return rudnn_failed(status, "submitting");
}

/* Bytes between the host and the device's `address`, by way of memory that both see. */
static inline int32_t rudnn_copy(rudnn_device *d, void *host, void *address, int64_t bytes,
                                 int to_host) {
    const VkMemoryPropertyFlags seen =
        VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    VkBufferCopy region = {0, 0, (VkDeviceSize)bytes};
    VkCommandBuffer commands;
    rudnn_memory *staging, *there;
    int64_t place;
    void *mapped = NULL;
    int slot;
    int32_t status;
    if (bytes <= 0) return to_host ? rudnn_wait(d) : RUDNN_OK;
    there = rudnn_find(d, address, &place);
    if (!there) return VK_ERROR_UNKNOWN;
    status = rudnn_new_memory(d, bytes, seen, &staging);
    if (status) return status;
    status = rudnn_failed(vkMapMemory(d->device, staging->memory, 0, VK_WHOLE_SIZE, 0, &mapped),
                          "mapping memory");
    if (!status && !to_host) memcpy(mapped, host, (size_t)bytes);
    if (!status) status = rudnn_begin(d, &slot, &commands);
    if (!status) {
        *(to_host ? &region.srcOffset : &region.dstOffset) = (VkDeviceSize)place;
        vkCmdCopyBuffer(commands, to_host ? there->buffer : staging->buffer,
                        to_host ? staging->buffer : there->buffer, 1, &region);
        status = rudnn_end(d, slot);
    }
    if (!status) status = rudnn_wait(d);
    if (!status && to_host) memcpy(host, mapped, (size_t)bytes);
    rudnn_drop(d, staging);
    return status;
}

static inline int32_t rudnn_copy_in(rudnn_device *d, void *to, const void *from, int64_t bytes) {
    return rudnn_copy(d, (void *)(uintptr_t)from, to, bytes, 0);
}

static inline int32_t rudnn_copy_out(rudnn_device *d, void *to, const void *from, int64_t bytes) {
    return rudnn_copy(d, to, (void *)(uintptr_t)from, bytes, 1);
}

static inline void rudnn_close(rudnn_device *d) {
    int i;
    if (!d) return;
    if (d->device) {
        vkDeviceWaitIdle(d->device);
        while (d->memory) {
            rudnn_memory *memory = d->memory;
            d->memory = memory->next;
            rudnn_drop(d, memory);
        }
        for (i = 0; i < RUDNN_RING; ++i) {
            rudnn_drop(d, d->numbers[i]);
            vkDestroyFence(d->device, d->fences[i], NULL);
        }
        vkDestroyCommandPool(d->device, d->pool, NULL);
        vkDestroyDevice(d->device, NULL);
    }
    if (d->instance) vkDestroyInstance(d->instance, NULL);
    free(d);
}

/* --- kernels --- */

static inline int32_t rudnn_read(const char *folder, const char *file, uint32_t **words,
                                 size_t *bytes) {
    char path[4096];
    FILE *stream;
    long size;
    *words = NULL;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    stream = fopen(path, "rb");
    if (!stream) return rudnn_failed(VK_ERROR_INITIALIZATION_FAILED, "reading %s", path);
    fseek(stream, 0, SEEK_END);
    size = ftell(stream);
    rewind(stream);
    *bytes = size > 0 ? (size_t)size : 0;
    *words = (uint32_t *)malloc(*bytes + 4);
    if (*words && fread(*words, 1, *bytes, stream) != *bytes) *bytes = 0;
    fclose(stream);
    if (!*words) return RUDNN_NO_MEMORY;
    if (*bytes >= 20 && *bytes % 4 == 0 && (*words)[0] == 0x07230203) return RUDNN_OK;
    return rudnn_failed(VK_ERROR_INITIALIZATION_FAILED, "reading SPIR-V from %s", path);
}

static inline int32_t rudnn_layout(rudnn_device *d, const rudnn_function *f, rudnn_pipeline *made) {
    VkDescriptorSetLayoutBinding bindings[RUDNN_MOST_BUFFERS];
    VkDescriptorSetLayoutCreateInfo set = {VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO,
        NULL, VK_DESCRIPTOR_SET_LAYOUT_CREATE_PUSH_DESCRIPTOR_BIT_KHR, 0, bindings};
    VkPushConstantRange numbers = {VK_SHADER_STAGE_COMPUTE_BIT, 0, (uint32_t)f->bytes};
    VkPipelineLayoutCreateInfo info = {VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO, NULL, 0, 1,
                                       &made->set, f->in_buffer || !f->bytes ? 0u : 1u, &numbers};
    uint32_t i, count = (uint32_t)(f->buffers + f->in_buffer);
    int32_t status;
    memset(bindings, 0, sizeof bindings);
    for (i = 0; i < count; ++i) {
        bindings[i].binding = i;
        bindings[i].descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
        bindings[i].descriptorCount = 1;
        bindings[i].stageFlags = VK_SHADER_STAGE_COMPUTE_BIT;
    }
    set.bindingCount = count;
    status = vkCreateDescriptorSetLayout(d->device, &set, NULL, &made->set);
    if (status >= 0) status = vkCreatePipelineLayout(d->device, &info, NULL, &made->layout);
    return rudnn_failed(status, "making the layout of %s", f->file);
}

static inline int32_t rudnn_compile(rudnn_device *d, const uint32_t *words, size_t bytes,
                                    const rudnn_function *f, rudnn_pipeline *made) {
    VkShaderModuleCreateInfo source = {VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO, NULL, 0, bytes,
                                       words};
    VkPipelineShaderStageRequiredSubgroupSizeCreateInfo size = {
        VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO, NULL,
        (uint32_t)f->subgroup};
    VkComputePipelineCreateInfo info;
    VkShaderModule module;
    int32_t status = rudnn_failed(vkCreateShaderModule(d->device, &source, NULL, &module),
                                  "loading %s", f->file);
    if (status) return status;
    memset(&info, 0, sizeof info);
    info.sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO;
    info.layout = made->layout;
    info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
    info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
    info.stage.module = module;
    info.stage.pName = "main";
    if (f->subgroup) {
        info.stage.pNext = &size;
        info.stage.flags = VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT;
    }
    status = vkCreateComputePipelines(d->device, VK_NULL_HANDLE, 1, &info, NULL, &made->pipeline);
    vkDestroyShaderModule(d->device, module, NULL);
    return rudnn_failed(status, "compiling %s", f->file);
}

static inline void rudnn_unload(rudnn_device *d, rudnn_module *module) {
    int i;
    if (!d || !module) return;
    rudnn_wait(d);
    for (i = 0; i < module->count; ++i) {
        vkDestroyPipeline(d->device, module->pipelines[i].pipeline, NULL);
        vkDestroyPipelineLayout(d->device, module->pipelines[i].layout, NULL);
        vkDestroyDescriptorSetLayout(d->device, module->pipelines[i].set, NULL);
    }
    free(module->pipelines);
    free(module);
}

static inline int32_t rudnn_load(rudnn_device *d, const char *folder,
                                 const rudnn_function *functions, int count, rudnn_module **made) {
    int32_t status = RUDNN_OK;
    int i;
    rudnn_module *module = *made = (rudnn_module *)calloc(1, sizeof *module);
    if (!module) return RUDNN_NO_MEMORY;
    module->functions = functions;
    module->pipelines = (rudnn_pipeline *)calloc((size_t)count + 1, sizeof *module->pipelines);
    if (!module->pipelines) status = RUDNN_NO_MEMORY;
    for (i = 0; i < count && !status; ++i) {
        uint32_t *words;
        size_t bytes;
        module->count = i + 1;
        status = rudnn_read(folder, functions[i].file, &words, &bytes);
        if (!status) status = rudnn_layout(d, &functions[i], &module->pipelines[i]);
        if (!status)
            status = rudnn_compile(d, words, bytes, &functions[i], &module->pipelines[i]);
        free(words);
    }
    if (!status) return RUDNN_OK;
    rudnn_unload(d, module);
    *made = NULL;
    return status;
}

/* --- launching --- */

/* Append a number of `size` bytes, aligned to them. */
static inline size_t rudnn_pack(unsigned char *block, size_t used, int64_t value, size_t size) {
    int32_t narrow = (int32_t)value;
    used = (used + size - 1) / size * size;
    memcpy(block + used, size == 8 ? (const void *)&value : (const void *)&narrow, size);
    return used + size;
}

/* Where the kernel's buffers lie, and its numbers. */
static inline int32_t rudnn_bind(rudnn_device *d, const rudnn_function *f,
                                 const rudnn_argument *arguments, int count,
                                 VkDescriptorBufferInfo *where, unsigned char *block) {
    size_t used = 0;
    int i;
    for (i = 0; i < count && arguments[i].kind == RUDNN_POINTER; ++i) {
        int64_t place, start = 0, element = f->elements[i];
        rudnn_memory *memory = rudnn_find(d, (void *)(intptr_t)arguments[i].bits, &place);
        if (!memory) return VK_ERROR_UNKNOWN;
        if (element) {
            start = place / element;
            place = 0;
        }
        where[i].buffer = memory->buffer;
        where[i].offset = (VkDeviceSize)place;
        where[i].range = VK_WHOLE_SIZE;
        used = rudnn_pack(block, used, start, 4);
    }
    for (; i < count; ++i)
        used = rudnn_pack(block, used, arguments[i].bits, arguments[i].kind == RUDNN_INT64 ? 8 : 4);
    return RUDNN_OK;
}

static inline int32_t rudnn_numbers(rudnn_device *d, int slot, const unsigned char *block,
                                    int32_t bytes, VkDescriptorBufferInfo *where) {
    const VkMemoryPropertyFlags seen =
        VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    void *mapped = NULL;
    int32_t status = rudnn_new_memory(d, bytes, seen, &d->numbers[slot]);
    if (status) return status;
    status = vkMapMemory(d->device, d->numbers[slot]->memory, 0, VK_WHOLE_SIZE, 0, &mapped);
    if (status >= 0) memcpy(mapped, block, (size_t)bytes);
    where->buffer = d->numbers[slot]->buffer;
    where->range = VK_WHOLE_SIZE;
    return rudnn_failed(status, "mapping memory");
}

/* The kernel's SPIR-V holds the number of threads of a block. */
static inline int32_t rudnn_launch(rudnn_device *d, rudnn_module *module, int function, int64_t x,
                                   int64_t y, int32_t block, const rudnn_argument *arguments,
                                   int count) {
    const rudnn_function *f = &module->functions[function];
    const rudnn_pipeline *p = &module->pipelines[function];
    VkDescriptorBufferInfo where[RUDNN_MOST_BUFFERS];
    VkWriteDescriptorSet writes[RUDNN_MOST_BUFFERS];
    unsigned char numbers[RUDNN_MOST_BYTES];
    VkCommandBuffer commands;
    uint32_t i, buffers = (uint32_t)(f->buffers + f->in_buffer);
    int slot;
    int32_t status;
    (void)block;
    if (x <= 0 || y <= 0) return RUDNN_OK;
    memset(where, 0, sizeof where);
    memset(writes, 0, sizeof writes);
    memset(numbers, 0, sizeof numbers);
    status = rudnn_bind(d, f, arguments, count, where, numbers);
    if (!status) status = rudnn_begin(d, &slot, &commands);
    if (status) return status;
    if (f->in_buffer) status = rudnn_numbers(d, slot, numbers, f->bytes, &where[f->buffers]);
    for (i = 0; i < buffers; ++i) {
        writes[i].sType = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET;
        writes[i].dstBinding = i;
        writes[i].descriptorCount = 1;
        writes[i].descriptorType = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
        writes[i].pBufferInfo = &where[i];
    }
    if (!status) {
        vkCmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, p->pipeline);
        if (buffers)
            d->push(commands, VK_PIPELINE_BIND_POINT_COMPUTE, p->layout, 0, buffers, writes);
        if (f->bytes && !f->in_buffer)
            vkCmdPushConstants(commands, p->layout, VK_SHADER_STAGE_COMPUTE_BIT, 0,
                               (uint32_t)f->bytes, numbers);
        vkCmdDispatch(commands, (uint32_t)x, (uint32_t)y, 1);
        status = rudnn_end(d, slot);
    } else {
        vkEndCommandBuffer(commands);
    }
    return status;
}

#endif
