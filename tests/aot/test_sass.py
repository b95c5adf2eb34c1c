"""What is read from the output of ptxas and nvdisasm. The excerpts are of kernels of this package, shortened."""

import dataclasses
import json

import pytest

from tilewright.aot.sass import KINDS, Binary, Occupancy, count_kinds, occupancy, read_binaries, read_code
from tilewright.aot.schedule import NotReadable
from tilewright.core.chip import Chip

# A consumer's loop over key blocks inside of a loop over tiles, and a producer's loop. The tests of barriers that failed
# are repeated at the end of the code, behind the last EXIT, and branch back into the loops.
ATTENTION = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'flash_attention_forward_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for flash_attention_forward_mosaic_gpu_kernel
    16 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 1 bytes smem
ptxas info    : Compile time = 629.617 ms

	.target	sm_90a
//--------------------- .text.flash_attention_forward_mosaic_gpu_kernel --------------------------
	.section	.text.flash_attention_forward_mosaic_gpu_kernel,"ax",@progbits
flash_attention_forward_mosaic_gpu_kernel:
.text.flash_attention_forward_mosaic_gpu_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
        /*0030*/              @!P1 BRA `(.L_x_1) ;
.L_x_12:
        /*0040*/                   STL [R1], R2 ;
        /*0050*/                   STL.64 [R1+0x8], R4 ;
.L_x_13:
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R10 ;
        /*0070*/              @!P1 BRA `(.L_x_8) ;
.L_x_23:
        /*0080*/                   HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR20].tnspB, R88 ;
        /*0090*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR44], R24, gsb0 ;
        /*00a0*/                   LDL.128 R4, [R1] ;
        /*00b0*/                   MUFU.EX2 R5, R4 ;
        /*00c0*/                   FFMA.FTZ R6, R5, R4, R6 ;
        /*00d0*/                   F2FP.BF16.F32.PACK_AB R120, R5, R6 ;
        /*00e0*/               @P1 BRA `(.L_x_13) ;
        /*00f0*/                   UTMASTG.4D [UR8], [UR4] ;
        /*0100*/               @P2 BRA `(.L_x_12) ;
        /*0110*/                   EXIT ;
.L_x_0:
        /*0120*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*0130*/              @!P1 EXIT ;
.L_x_19:
        /*0140*/                   UTMALDG.4D [UR8], [UR4], desc[UR6] ;
        /*0150*/               @P1 BRA `(.L_x_19) ;
        /*0160*/                   EXIT ;
.L_x_8:
        /*0170*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R10+URZ], R9 ;
        /*0180*/              @!P1 NANOSLEEP.SYNCS 0x989680 ;
        /*0190*/              @!P1 BRA `(.L_x_8) ;
        /*01a0*/                   BRA `(.L_x_23) ;
.L_x_31:
        /*01b0*/                   BRA `(.L_x_31);
.L_x_32:

; ModuleID = 'LLVMDialectModule'
declare void @mosaic_gpu_build_kernel_spec(ptr, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, ptr, ptr)
define void @flash_attention_forward_mosaic_gpu(ptr %0, ptr %1) {
  call void @mosaic_gpu_build_kernel_spec(ptr %0, i32 2, i32 8, i32 1, i32 0, i32 0, i32 0, i32 384, i32 1, i32 1, i32 85080, i32 0, i32 1, ptr %3, ptr %4)
define void @_mlir_ciface_flash_attention_forward_mosaic_gpu(ptr %0, ptr %1) {
"""  # noqa: E501

# A product whose PTX was changed by hand: a call stands between its wgmma instructions. Launched as jax 0.11 does.
SERIALISED = """
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility across compilation units.
ptxas info    : (C7519) Potential Performance Loss: wgmma.mma_async instructions are serialized due to program dependence on compiler-inserted WG.AR in divergent path in the function 'matmul_dx_mosaic_gpu_kernel' in line 305
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'matmul_dx_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for matmul_dx_mosaic_gpu_kernel
    512 bytes stack frame, 1148 bytes spill stores, 1148 bytes spill loads
ptxas info    : Used 154 registers, used 16 barriers, 17 bytes smem
.text.matmul_dx_mosaic_gpu_kernel:
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0010*/                   EXIT ;
; ModuleID = 'LLVMDialectModule'
define i32 @matmul_dx_mosaic_gpu(ptr %0, ptr %1, ptr %2) {
  %182 = call i32 @mosaic_gpu_launch_kernel(ptr %0, i32 132, i32 1, i32 1, i32 2, i32 1, i32 1, i32 256, i32 1, i32 1, i32 1024, i32 0, ptr %1, ptr %179)
"""  # noqa: E501

H200 = Chip.named("h200")


def test_resources_and_launch() -> None:
    attention, product = read_binaries(ATTENTION + SERIALISED)
    assert (attention.name, attention.arch) == ("flash_attention_forward", "sm_90a")
    assert (attention.registers, attention.setmaxnreg) == (168, (240, 24))
    assert (attention.stack_bytes, attention.spill_store_bytes, attention.spill_load_bytes) == (16, 12, 16)
    assert (attention.grid, attention.cluster, attention.threads) == ((2, 8, 1), (1, 1, 1), 384)
    assert attention.smem_bytes == 85080 + 1
    assert (product.grid, product.cluster, product.smem_bytes) == ((132, 1, 1), (2, 1, 1), 1024 + 17)
    # Remarks belong to the kernel that they precede.
    assert attention.remarks == ()
    assert [remark[-7:] for remark in product.remarks] == ["(C7504)", "(C7519)"]
    assert product.serialised == product.remarks[1:]


def test_loops_are_those_of_the_control_flow_and_spills_are_counted_in_each() -> None:
    (attention,) = read_binaries(ATTENTION)
    found = {loop.start: (loop.depth, loop.instructions, loop.spill_bytes) for loop in attention.loops}
    # The waits behind the last EXIT are no loops of their own, and do not make the code between them and their target one:
    # a branch back to it (at 0x1a0) is in the loop over key blocks. So 9 instructions and that one.
    assert found == {0x40: (1, 4, 4 + 8), 0x60: (2, 10, 16), 0x140: (1, 2, 0)}
    assert attention.spill_bytes_in_loops == 28
    steady = attention.steady_state
    assert steady is not None
    assert steady.start == 0x60
    assert steady.kinds == {"wgmma": 2, "spill": 1, "MUFU": 1, "FP32": 1, "convert": 1, "barrier": 1, "control": 3}


def test_the_steady_state_is_an_inner_loop_and_of_two_alike_the_one_without_a_mask() -> None:
    """A loop over tiles has the first and last steps of its sum, which may be more than those of the loop inside."""
    peeled = "HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR20].tnspB, R88 ;"
    more = f"/*0044*/ {peeled}\n /*0048*/ {peeled}\n /*004c*/ {peeled}\n        /*0050*/"
    (attention,) = read_binaries(ATTENTION.replace("/*0050*/", more))
    assert attention.steady_state is not None
    assert (attention.steady_state.start, attention.steady_state.around) == (0x60, (0x40,))
    # The producer's loop, were it one for blocks that a mask does not cut.
    (attention,) = read_binaries(
        ATTENTION.replace("UTMALDG.4D [UR8]", f"{peeled} \n /*0142*/ {peeled} \n/*0144*/ FADD R1")
    )
    assert attention.steady_state is not None
    assert (attention.steady_state.start, attention.steady_state.instructions) == (0x140, 4)


def test_without_matrix_instructions_the_longest_loop_is_the_steady_state() -> None:
    (attention,) = read_binaries(ATTENTION.replace("HGMMA", "IMAD"))
    assert attention.steady_state is not None
    assert attention.steady_state.start == 0x60
    (product,) = read_binaries(SERIALISED)
    assert product.loops == ()
    assert product.steady_state is None


def test_threads_that_diverge_meet_where_the_barrier_register_says() -> None:
    """BSYNC continues at the label of its BSSY, here behind the loop's end: without it the loop would not end."""
    code = """
.L_x_0:
        /*0000*/                   BSSY B0, `(.L_x_2) ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
        /*0020*/                   FADD R1, R2, R3 ;
        /*0030*/                   BSYNC B0 ;
.L_x_1:
        /*0040*/                   BRA `(.L_x_0) ;
.L_x_2:
        /*0050*/                   FMUL R1, R2, R3 ;
        /*0060*/                   EXIT ;
"""
    (loop,) = read_code(code)["loops"]
    assert loop.opcodes == {"BRA": 2, "BSSY": 1}


def test_what_cannot_be_read_is_named() -> None:
    assert read_binaries("") == []  # A program without kernels.
    with pytest.raises(
        NotReadable, match="no machine code or no launch was printed for flash_attention_forward_mosaic"
    ):
        read_binaries(ATTENTION.replace("define void @flash", "define void @other"))
    with pytest.raises(NotReadable, match="ptxas reported no registers for flash_attention_forward_mosaic_gpu_kernel"):
        read_binaries(ATTENTION.replace("Used 168 registers", ""))
    with pytest.raises(NotReadable, match="no instructions"):
        read_code("nvdisasm info    : File is empty")


def test_kinds() -> None:
    every = "HGMMA UTCHMMA HMMA UTMALDG LDGSTS STL MUFU FFMA2 HFMA2 I2FP LDSM LDG SHFL SYNCS BRA UIADD3 IMAD".split()
    assert list(count_kinds(dict.fromkeys(every, 1))) == list(KINDS)
    assert count_kinds({"LDSM": 2, "STS": 1, "LDS": 3, "IADD3": 4}) == {"shared": 6, "integer and moves": 4}


@pytest.mark.parametrize(
    ("registers", "threads", "smem", "expected"),
    [
        # 168 x 384 is nearly all of 65,536 registers. 85 KiB would fit twice.
        (168, 384, 85_081, Occupancy(1, ("registers",), 12)),
        (168, 384, 200_809, Occupancy(1, ("registers", "SMEM"), 12)),
        # A warp's 255 registers take 256: two blocks of four warps per partition's 16,384.
        (255, 128, 87_049, Occupancy(2, ("registers", "SMEM"), 8)),
        (32, 128, 113_000, Occupancy(2, ("SMEM",), 8)),
        # Each block takes 1 KiB more than it asks for: twice 114 KiB would be all of 228.
        (32, 128, 114 * 1024, Occupancy(1, ("SMEM",), 4)),
        (16, 32, 0, Occupancy(32, ("registers", "blocks"), 32)),
        (16, 96, 0, Occupancy(21, ("threads",), 63)),
        (32, 1024, 0, Occupancy(2, ("registers", "threads"), 64)),
    ],
)
def test_occupancy_by_hand(registers: int, threads: int, smem: int, expected: Occupancy) -> None:
    (binary,) = read_binaries(ATTENTION)
    changed = dataclasses.replace(
        binary, registers=registers, block=(threads, 1, 1), dynamic_smem_bytes=smem, static_smem_bytes=0
    )
    assert occupancy(changed, H200) == expected


def test_json_and_back() -> None:
    binaries = read_binaries(ATTENTION + SERIALISED)
    assert [Binary.from_dict(json.loads(json.dumps(dataclasses.asdict(each)))) for each in binaries] == binaries
    told = binaries[0].to_dict()
    assert told["steady_state"] == {"start": 0x60, "kinds": told["loops"][1]["kinds"]}
    assert (told["threads"], told["spill_bytes_in_loops"]) == (384, 28)
