; What generated kernels call. Everything here is inlined.

; A work-group barrier at which the group's memory is the same for all. The bare instruction that
; TVM emits waits for nobody's stores.
define linkonce_odr hidden void @rudnn_barrier() #0 {
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  ret void
}

; The same for shared memory alone: loads of global memory may be in flight across it.
define linkonce_odr hidden void @rudnn_barrier_shared() #0 {
  fence syncscope("workgroup") release, !mmra !0
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire, !mmra !0
  ret void
}

; The value that another lane of the wavefront holds; `lane` counts from its first.
define linkonce_odr hidden i32 @rudnn_shuffle_i32(i32 %value, i32 %lane) #0 {
  %address = shl i32 %lane, 2
  %found = call i32 @llvm.amdgcn.ds.bpermute(i32 %address, i32 %value)
  ret i32 %found
}

define linkonce_odr hidden i64 @rudnn_shuffle_i64(i64 %value, i32 %lane) #0 {
  %both = bitcast i64 %value to <2 x i32>
  %low = extractelement <2 x i32> %both, i32 0
  %high = extractelement <2 x i32> %both, i32 1
  %low_found = call i32 @rudnn_shuffle_i32(i32 %low, i32 %lane)
  %high_found = call i32 @rudnn_shuffle_i32(i32 %high, i32 %lane)
  %half_made = insertelement <2 x i32> poison, i32 %low_found, i32 0
  %made = insertelement <2 x i32> %half_made, i32 %high_found, i32 1
  %result = bitcast <2 x i32> %made to i64
  ret i64 %result
}

; Memory of the device itself, as the driver allocates it: the instruction serves.
define linkonce_odr hidden float @rudnn_atomic_add_f32(ptr addrspace(1) %at, float %value) #0 {
  %old = atomicrmw fadd ptr addrspace(1) %at, float %value syncscope("agent") monotonic, align 4, !amdgpu.no.fine.grained.memory !1, !amdgpu.no.remote.memory !1, !amdgpu.ignore.denormal.mode !1
  ret float %old
}

; A value put in a cell of the thread's own, in the midst of an expression.
define linkonce_odr hidden float @rudnn_keep_f32(ptr addrspace(5) %cell, float %value) #0 {
  store float %value, ptr addrspace(5) %cell
  ret float %value
}

define linkonce_odr hidden half @rudnn_keep_f16(ptr addrspace(5) %cell, half %value) #0 {
  store half %value, ptr addrspace(5) %cell
  ret half %value
}

define linkonce_odr hidden i8 @rudnn_keep_i8(ptr addrspace(5) %cell, i8 %value) #0 {
  store i8 %value, ptr addrspace(5) %cell
  ret i8 %value
}

define linkonce_odr hidden i16 @rudnn_keep_i16(ptr addrspace(5) %cell, i16 %value) #0 {
  store i16 %value, ptr addrspace(5) %cell
  ret i16 %value
}

define linkonce_odr hidden i32 @rudnn_keep_i32(ptr addrspace(5) %cell, i32 %value) #0 {
  store i32 %value, ptr addrspace(5) %cell
  ret i32 %value
}

declare void @llvm.amdgcn.s.barrier()
declare i32 @llvm.amdgcn.ds.bpermute(i32, i32)
declare i32 @llvm.amdgcn.workitem.id.x()

attributes #0 = { alwaysinline convergent nounwind }

!0 = !{!"amdgpu-synchronize-as", !"local"}
!1 = !{}
