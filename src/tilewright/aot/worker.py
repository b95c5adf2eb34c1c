"""Compiles one StableHLO program for one topology with libtpu or jax's CUDA plugin, through the PJRT C API.

It is run as a script, by any Python 3.9 or later, in a process of its own: a compiler may crash, and reads its flags once.
It imports only the standard library, since under emulation nothing else is installed.

    python worker.py LIBRARY TOPOLOGY DESCRIPTION PROGRAM OPTIONS ANSWER [OPTIMIZED]

LIBRARY is the compiler. DESCRIPTION is a JSON object with the settings that the topology is made with, texts by name; it is
empty where the name is enough. PROGRAM is serialized StableHLO, and OPTIONS is a serialized CompileOptionsProto. One JSON
object is written to ANSWER:
{"ok": true, "code_bytes": ..., "temp_bytes": ..., ...} or {"ok": false, "error": "..."}. Where OPTIMIZED is given, the
optimised program is written there, as the compiler serializes it.

The struct below mirrors the beginning of PJRT_Api: versions, then function pointers in the order that the ABI fixes.
"""

import ctypes
import json
import os
import sys
import threading
import time

POINTER, SIZE, INT64, TEXT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_char_p

# Every function up to the last one that is called here, without the prefix "PJRT_".
FUNCTIONS = """
Error_Destroy Error_Message Error_GetCode
Plugin_Initialize Plugin_Attributes
Event_Destroy Event_IsReady Event_Error Event_Await Event_OnReady
Client_Create Client_Destroy Client_PlatformName Client_ProcessIndex Client_PlatformVersion Client_Devices
Client_AddressableDevices Client_LookupDevice Client_LookupAddressableDevice Client_AddressableMemories Client_Compile
Client_DefaultDeviceAssignment Client_BufferFromHostBuffer
DeviceDescription_Id DeviceDescription_ProcessIndex DeviceDescription_Attributes DeviceDescription_Kind
DeviceDescription_DebugString DeviceDescription_ToString
Device_GetDescription Device_IsAddressable Device_LocalHardwareId Device_AddressableMemories Device_DefaultMemory
Device_MemoryStats
Memory_Id Memory_Kind Memory_DebugString Memory_ToString Memory_AddressableByDevices
Executable_Destroy Executable_Name Executable_NumReplicas Executable_NumPartitions Executable_NumOutputs
Executable_SizeOfGeneratedCodeInBytes Executable_GetCostAnalysis Executable_OutputMemoryKinds
Executable_OptimizedProgram Executable_Serialize
LoadedExecutable_Destroy LoadedExecutable_GetExecutable LoadedExecutable_AddressableDevices LoadedExecutable_Delete
LoadedExecutable_IsDeleted LoadedExecutable_Execute Executable_DeserializeAndLoad LoadedExecutable_Fingerprint
Buffer_Destroy Buffer_ElementType Buffer_Dimensions Buffer_UnpaddedDimensions Buffer_DynamicDimensionIndices
Buffer_GetMemoryLayout Buffer_OnDeviceSizeInBytes Buffer_Device Buffer_Memory Buffer_Delete Buffer_IsDeleted
Buffer_CopyToDevice Buffer_ToHostBuffer Buffer_IsOnCpu Buffer_ReadyEvent Buffer_UnsafePointer
Buffer_IncreaseExternalReferenceCount Buffer_DecreaseExternalReferenceCount Buffer_OpaqueDeviceMemoryDataPointer
CopyToDeviceStream_Destroy CopyToDeviceStream_AddChunk CopyToDeviceStream_TotalBytes CopyToDeviceStream_GranuleSize
CopyToDeviceStream_CurrentBytes
TopologyDescription_Create TopologyDescription_Destroy TopologyDescription_PlatformName
TopologyDescription_PlatformVersion TopologyDescription_GetDeviceDescriptions TopologyDescription_Serialize
TopologyDescription_Attributes
Compile
Executable_OutputElementTypes Executable_OutputDimensions Buffer_CopyToMemory Client_CreateViewOfDeviceBuffer
Executable_Fingerprint Client_TopologyDescription Executable_GetCompiledMemoryStats
""".split()


class Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", SIZE),
        ("extensions", POINTER),
        ("version_size", SIZE),
        ("version_extensions", POINTER),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        *[(name, POINTER) for name in FUNCTIONS],
    ]


def arguments(*fields):
    """A struct as every function of the API takes it: its size, its extensions, then the fields."""

    class Arguments(ctypes.Structure):
        _fields_ = [("struct_size", SIZE), ("extensions", POINTER), *fields]

    return Arguments


ErrorMessage = arguments(("error", POINTER), ("message", POINTER), ("size", SIZE))
Initialize = arguments()
NamedText = arguments(
    ("name", TEXT), ("name_size", SIZE), ("kind", ctypes.c_int), ("value", TEXT), ("value_size", SIZE)
)
CreateTopology = arguments(
    ("name", TEXT), ("name_size", SIZE), ("options", POINTER), ("num_options", SIZE), ("topology", POINTER)
)
Program = arguments(("code", POINTER), ("code_size", SIZE), ("format", TEXT), ("format_size", SIZE))
CompileProgram = arguments(
    ("topology", POINTER),
    ("program", POINTER),
    ("options", TEXT),
    ("options_size", SIZE),
    ("client", POINTER),
    ("executable", POINTER),
)
CodeSize = arguments(("executable", POINTER), ("size", INT64))
MemoryStats = arguments(
    ("executable", POINTER),
    ("code_bytes", INT64),
    ("argument_bytes", INT64),
    ("output_bytes", INT64),
    ("alias_bytes", INT64),
    ("temp_bytes", INT64),
    ("host", INT64 * 5),  # The same for the host's memory.
    ("peak_bytes", INT64),
)
OptimizedProgram = arguments(("executable", POINTER), ("program", POINTER))


def compile_program(library, topology, description, program, options, optimized=None):
    """Loads the compiler, compiles, and returns the sizes of the executable. `optimized`: the file for its program."""
    library = ctypes.CDLL(library)
    library.GetPjrtApi.restype = ctypes.POINTER(Api)
    api = library.GetPjrtApi().contents

    def call(name, filled):
        filled.struct_size = ctypes.sizeof(filled)
        error = ctypes.CFUNCTYPE(POINTER, POINTER)(getattr(api, name))(ctypes.addressof(filled))
        if error:
            message = ErrorMessage(error=error, struct_size=ctypes.sizeof(ErrorMessage))
            ctypes.CFUNCTYPE(None, POINTER)(api.Error_Message)(ctypes.addressof(message))
            raise RuntimeError(ctypes.string_at(message.message, message.size).decode(errors="replace"))
        return filled

    call("Plugin_Initialize", Initialize())
    name = topology.encode()
    settings = (NamedText * len(description))()
    for place, (key, value) in enumerate((key.encode(), value.encode()) for key, value in description.items()):
        settings[place] = NamedText(name=key, name_size=len(key), value=value, value_size=len(value))
        settings[place].struct_size = ctypes.sizeof(NamedText)
    where = call(
        "TopologyDescription_Create",
        CreateTopology(
            name=name, name_size=len(name), options=ctypes.addressof(settings), num_options=len(description)
        ),
    )
    code = ctypes.create_string_buffer(program, len(program))
    source = Program(code=ctypes.addressof(code), code_size=len(program), format=b"mlir", format_size=4)
    source.struct_size = ctypes.sizeof(source)
    compiled = call(
        "Compile",
        CompileProgram(
            topology=where.topology, program=ctypes.addressof(source), options=options, options_size=len(options)
        ),
    )
    size = call("Executable_SizeOfGeneratedCodeInBytes", CodeSize(executable=compiled.executable)).size
    stats = call("Executable_GetCompiledMemoryStats", MemoryStats(executable=compiled.executable))
    if optimized is not None:
        write_optimized(call, compiled.executable, optimized)
    names = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes")
    return {"ok": True, "code_bytes": size, **{field: getattr(stats, field) for field in names}}


def write_optimized(call, executable, path):
    """Writes an executable's optimised program. The first call says how long it is."""
    program = Program()
    program.struct_size = ctypes.sizeof(program)
    call("Executable_OptimizedProgram", OptimizedProgram(executable=executable, program=ctypes.addressof(program)))
    code = ctypes.create_string_buffer(program.code_size)
    program.code = ctypes.addressof(code)
    call("Executable_OptimizedProgram", OptimizedProgram(executable=executable, program=ctypes.addressof(program)))
    with open(path, "wb") as file:
        file.write(code.raw)


def end_with_parent():
    """Ends this process if its parent is gone: a compile may take minutes, and nothing waits for it then."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(4)


def main():
    threading.Thread(target=end_with_parent, daemon=True).start()
    library, topology, description, program, options, answer, *optimized = sys.argv[1:]
    with open(description) as file:
        described = json.load(file)
    with open(program, "rb") as file:
        code = file.read()
    with open(options, "rb") as file:
        settings = file.read()
    try:
        told = compile_program(library, topology, described, code, settings, *optimized)
    except RuntimeError as error:
        told = {"ok": False, "error": str(error)}
    with open(answer, "w") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main()
