//! Programs that the tracer might disturb, and does not.

use std::path::Path;
use std::process::{Command, Stdio};

use warden_rig::{Context as _, Home, Outcome, Trouble, binaries};
use warden_tracer_reader::{AllocationKind, TRACE_VARIABLE, write_library};

use super::{MIB, Traced, cc};

/// Registers an unwind table at run time and uses it, for which libgcc allocates under its lock. A deadlock
/// ends the program.
const FRAMES: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
extern void __register_frame_info_bases(const void *, void *, void *, void *);
extern const void *_Unwind_Find_FDE(void *, void *);
enum { FRAMES = 8192 };
struct common { uint32_t length, id; uint8_t version, augmentation, code, data, address, nothing[3]; };
struct frame { uint32_t length, common; uint64_t start, bytes; };
static struct { struct common common; struct frame frames[FRAMES]; uint32_t end; } table;
static char code[FRAMES * 16];
static void *room[16], *found[3];
__attribute__((noinline)) static int allocate(void) {
    for (int i = 0; i < 10; i++) if (!malloc(1 << 20)) return 0;
    return 1;
}
static int registered(void) {
    table.common = (struct common){sizeof table.common - 4, 0, 1, 0, 1, 0x78, 16, {0}};
    for (int i = 0; i < FRAMES; i++) {
        struct frame *frame = &table.frames[FRAMES - 1 - i];
        uint32_t back = (char *)&frame->common - (char *)&table.common;
        *frame = (struct frame){sizeof *frame - 4, back, (uintptr_t)&code[i * 16], 16};
    }
#ifdef LOOKS_UP
    void (*add)(const void *, void *, void *, void *) =
        dlsym(dlopen("libgcc_s.so.1", RTLD_LAZY), "__register_frame_info_bases");
#else
    void (*add)(const void *, void *, void *, void *) = __register_frame_info_bases;
#endif
    add(&table, room, 0, 0);
    return _Unwind_Find_FDE(&code[5], found) == &table.frames[FRAMES - 1];
}
int main(void) {
    char line[64];
    alarm(120);
    while (fgets(line, sizeof line, stdin)) {
        if (strcmp(line, "register\n") ? !allocate() : !registered()) return 1;
        puts("done");
        fflush(stdout);
    }
    return 0;
}
"#;

#[test]
fn a_program_that_registers_frames_goes_on_and_is_counted_at_no_place() -> Outcome {
    for how in ["-DCALLS", "-DLOOKS_UP"] {
        let home = Home::new()?;
        program(home.path(), FRAMES, &["-fno-builtin", how, "-ldl"])?;
        let mut program = Traced::start(&home.path().join("program"), &[])?;
        program.told("allocate")?;
        assert_eq!(program.lives_at("allocate")?, (10 * MIB, 10.0), "as in any program");
        assert_eq!(program.snapshot()?.losses.short_walks, 0);
        program.told("register")?;
        let before = program.snapshot()?;
        program.told("allocate")?;
        let now = program.snapshot()?;
        assert!(now.losses.short_walks >= before.losses.short_walks + 10, "{:?}", now.losses);
        assert_eq!(now.losses.unfollowed, 0);
        let places = program.places(Some(&before))?;
        let first = places.first().context("no places")?;
        assert_eq!((first.function.as_str(), first.more_bytes), ("malloc", 10 * MIB), "{how}: {first:?}");
        assert!((first.more_count - 10.0).abs() < 1e-9 && first.chain.is_empty(), "{how}: {first:?}");
        program.end()?;
    }
    Ok(())
}

#[test]
fn a_program_whose_files_may_not_be_large_enough_runs_without() -> Outcome {
    // Limits in blocks of 512 bytes: below both files, between them, and enough.
    for (blocks, published) in [("100", 0), ("12288", 0), ("65536", 1)] {
        let home = Home::new()?;
        let library = write_library(home.path())?;
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -f $BLOCKS && LD_PRELOAD=$LIBRARY exec $PROGRAM"]);
        command.envs([("LIBRARY", library), ("PROGRAM", binaries::leaky()?)]);
        let ran =
            command.env(TRACE_VARIABLE, home.path()).env("BLOCKS", blocks).stdin(Stdio::null()).output()?;
        assert!(ran.status.success() && ran.stderr.is_empty(), "{blocks}: {ran:?}");
        let files = std::fs::read_dir(home.path())?.filter_map(Result::ok);
        let traces = files.filter(|file| file.path().extension().is_some_and(|end| end == "trace"));
        assert_eq!(traces.count(), published, "{blocks}");
    }
    Ok(())
}

/// Looks up CUDA functions in all ways that may find the tracer's, and calls the result.
const LOOKS: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(void) {
    char line[64];
    const char *names[] = {"cudaMalloc", "cuMemAlloc_v2", "cuGetProcAddress", "cuGetProcAddress_v2"};
    void *ways[] = {RTLD_DEFAULT, RTLD_NEXT, dlopen(0, RTLD_LAZY)};
    while (fgets(line, sizeof line, stdin)) {
        for (int i = 0; i < 12; i++) {
            int (*at)(void **, size_t) = dlsym(ways[i % 3], names[i / 3]);
            const char *error = dlerror();
            void *memory = 0;
            int is_there = getenv("CUDART") && i / 3 == 0;
            if (!at != !is_there || !at != !!error) return 1;
            if (at && (at(&memory, 1 << 20) || !memory)) return 2;
        }
        if (!dlsym(RTLD_DEFAULT, "malloc") || dlerror()) return 3;
        puts("done");
        fflush(stdout);
    }
    return 0;
}
"#;

const CUDART: &str = "int cudaMalloc(void **out, unsigned long bytes) { static char *next; *out = next += 4096; return !bytes; }\n";

#[test]
fn functions_of_cuda_are_not_found_where_there_is_no_cuda() -> Outcome {
    let home = Home::new()?;
    program(home.path(), LOOKS, &["-ldl"])?;
    let looks = home.path().join("program");
    for variables in [&[][..], &[(TRACE_VARIABLE, "/proc/nowhere")]] {
        let mut program = Traced::start(&looks, variables)?;
        program.told("nothing")?;
        program.end()?;
    }
    std::fs::write(home.path().join("cudart.c"), CUDART)?;
    cc(&["-shared", "-fPIC", "-o", "libcudart.so", "cudart.c"], home.path())?;
    program(home.path(), LOOKS, &["-Wl,--no-as-needed", "libcudart.so", "-ldl"])?;
    let folder = home.path().to_string_lossy();
    let mut program = Traced::start(&looks, &[("CUDART", "1"), ("LD_LIBRARY_PATH", &folder)])?;
    program.told("something")?;
    assert_eq!(
        program.snapshot()?.live_bytes(&[AllocationKind::Device]),
        3 * MIB,
        "each way finds what is counted"
    );
    program.end()
}

fn program(folder: &Path, source: &str, options: &[&str]) -> Result<(), Trouble> {
    std::fs::write(folder.join("program.c"), source)?;
    cc(&[&["-O1", "-o", "program", "program.c"], options].concat(), folder)
}
