"""Numbers of SPIR-V 1.5 that the emitter uses, named as in the specification."""

from __future__ import annotations

from enum import IntEnum

MAGIC = 0x07230203
VERSION_1_5 = 0x00010500


class Op(IntEnum):
    """Instructions."""

    Extension = 10
    ExtInstImport = 11
    ExtInst = 12
    MemoryModel = 14
    EntryPoint = 15
    ExecutionMode = 16
    Capability = 17
    TypeVoid = 19
    TypeBool = 20
    TypeInt = 21
    TypeFloat = 22
    TypeVector = 23
    TypeArray = 28
    TypeRuntimeArray = 29
    TypeStruct = 30
    TypePointer = 32
    TypeFunction = 33
    ConstantTrue = 41
    ConstantFalse = 42
    Constant = 43
    ConstantComposite = 44
    Function = 54
    FunctionEnd = 56
    Variable = 59
    Load = 61
    Store = 62
    AccessChain = 65
    Decorate = 71
    MemberDecorate = 72
    CompositeConstruct = 80
    CompositeExtract = 81
    ConvertFToU = 109
    ConvertFToS = 110
    ConvertSToF = 111
    ConvertUToF = 112
    UConvert = 113
    SConvert = 114
    FConvert = 115
    Bitcast = 124
    FNegate = 127
    IAdd = 128
    FAdd = 129
    ISub = 130
    FSub = 131
    IMul = 132
    FMul = 133
    UDiv = 134
    SDiv = 135
    FDiv = 136
    UMod = 137
    IsNan = 156
    LogicalEqual = 164
    LogicalNotEqual = 165
    LogicalOr = 166
    LogicalAnd = 167
    LogicalNot = 168
    Select = 169
    IEqual = 170
    INotEqual = 171
    UGreaterThan = 172
    SGreaterThan = 173
    UGreaterThanEqual = 174
    SGreaterThanEqual = 175
    ULessThan = 176
    SLessThan = 177
    ULessThanEqual = 178
    SLessThanEqual = 179
    FOrdEqual = 180
    FUnordNotEqual = 183
    FOrdLessThan = 184
    FOrdGreaterThan = 186
    FOrdLessThanEqual = 188
    FOrdGreaterThanEqual = 190
    ShiftRightLogical = 194
    ShiftRightArithmetic = 195
    ShiftLeftLogical = 196
    BitwiseOr = 197
    BitwiseXor = 198
    BitwiseAnd = 199
    Not = 200
    ControlBarrier = 224
    AtomicLoad = 227
    AtomicCompareExchange = 230
    Phi = 245
    LoopMerge = 246
    SelectionMerge = 247
    Label = 248
    Branch = 249
    BranchConditional = 250
    Return = 253
    GroupNonUniformShuffle = 345
    GroupNonUniformShuffleDown = 348
    TypeCooperativeMatrixKHR = 4456
    CooperativeMatrixLoadKHR = 4457
    CooperativeMatrixStoreKHR = 4458
    CooperativeMatrixMulAddKHR = 4459
    AtomicFAddEXT = 6035


class Glsl(IntEnum):
    """Instructions of the set GLSL.std.450."""

    Trunc = 3
    FAbs = 4
    Floor = 8
    Ceil = 9
    Sqrt = 31
    Fma = 50


class Storage(IntEnum):
    """Storage classes."""

    Input = 1
    Workgroup = 4
    Function = 7
    PushConstant = 9
    StorageBuffer = 12


class Capability(IntEnum):
    Shader = 1
    Float16 = 9
    Int64 = 11
    Int16 = 22
    Int8 = 39
    GroupNonUniform = 61
    GroupNonUniformShuffle = 65
    GroupNonUniformShuffleRelative = 66
    StorageBuffer16BitAccess = 4433
    StorageBuffer8BitAccess = 4448
    DenormPreserve = 4464
    SignedZeroInfNanPreserve = 4466
    RoundingModeRTE = 4467
    BFloat16TypeKHR = 5116
    BFloat16CooperativeMatrixKHR = 5118
    VulkanMemoryModel = 5345
    CooperativeMatrixKHR = 6022
    AtomicFloat32AddEXT = 6033


class Mode(IntEnum):
    """Execution modes."""

    LocalSize = 17
    DenormPreserve = 4459
    SignedZeroInfNanPreserve = 4461
    RoundingModeRTE = 4462


class Decoration(IntEnum):
    Block = 2
    ArrayStride = 6
    BuiltIn = 11
    Aliased = 20
    Coherent = 23
    NonWritable = 24
    Binding = 33
    DescriptorSet = 34
    Offset = 35
    NoContraction = 42


class BuiltIn(IntEnum):
    WorkgroupId = 26
    LocalInvocationIndex = 29
    SubgroupSize = 36
    SubgroupId = 40
    SubgroupLocalInvocationId = 41


class Scope(IntEnum):
    Device = 1
    Workgroup = 2
    Subgroup = 3
    QueueFamily = 5


class Semantics(IntEnum):
    """Bits of memory semantics."""

    Relaxed = 0
    AcquireRelease = 0x8
    UniformMemory = 0x40
    WorkgroupMemory = 0x100
    MakeAvailable = 0x2000
    MakeVisible = 0x4000


class LoopControl(IntEnum):
    Nothing = 0
    Unroll = 1


GLCOMPUTE = 5
GLSL450_MEMORY, VULKAN_MEMORY = 1, 3
NON_PRIVATE_POINTER = 0x20  # a memory operand
ROW_MAJOR, COLUMN_MAJOR = 0, 1
BFLOAT16_ENCODING = 0
MATRIX_A, MATRIX_B, MATRIX_ACCUMULATOR = 0, 1, 2
