//! The tracer with a simulated CUDA runtime and driver (`tests/fake-cuda`), for each way of loading them.

use std::path::{Path, PathBuf};

use warden_rig::{Context as _, Home, Outcome, Trouble};
use warden_tracer_reader::{AllocationKind, TracedMemory};

use super::{MIB, Traced, cc};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Runtime {
    Shared,
    /// Shared, with the interface of CUDA 11.
    SharedOld,
    /// Linked into the program, as in some builds.
    Linked,
    /// Opened locally under another name by a library, which gets the driver's functions from the runtime.
    Opened,
    /// Opened globally, and closed after each round.
    Closed,
}

/// Compiles the program of `tests/fake-cuda` with its driver and runtime.
fn cuda_program(folder: &Path, runtime: Runtime) -> Result<PathBuf, Trouble> {
    let source = |name: &str| format!("{}/fake-cuda/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let old = if runtime == Runtime::SharedOld { "-DOLD" } else { "-DNEW" };
    cc(
        &["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", &source("cuda")],
        folder,
    )?;
    let (program, cudart) = (source("program"), source("cudart"));
    let library = ["-O1", "-shared", "-fPIC", old];
    match runtime {
        Runtime::Linked => cc(&["-O1", "-o", "program", &program, &cudart, "libcuda.so.1", "-ldl"], folder)?,
        Runtime::Shared | Runtime::SharedOld => {
            let name = ["-Wl,-soname,libcudart.so.12", "-o", "libcudart.so.12", &cudart, "-ldl"];
            cc(&[&library[..], &name].concat(), folder)?;
            cc(&["-O1", old, "-o", "program", &program, "libcudart.so.12", "libcuda.so.1"], folder)?;
        }
        Runtime::Opened | Runtime::Closed => {
            let name = [
                "-Wl,--hash-style=sysv",
                "-Wl,-soname,libcudart-3f2a.so.13.0",
                "-o",
                "libcudart-3f2a.so.13.0",
            ];
            cc(&[&library[..], &name, &[&cudart, "-ldl"]].concat(), folder)?;
            let backend = ["-DLIBRARY", "-o", "libbackend.so", &program, "libcudart-3f2a.so.13.0"];
            cc(&[&library[..], &backend].concat(), folder)?;
            let closes = if runtime == Runtime::Closed { "-DCLOSES" } else { "-DKEEPS" };
            cc(&["-O1", "-DOPENS", closes, "-o", "program", &program, "-ldl"], folder)?;
        }
    }
    Ok(folder.join("program"))
}

/// Checks the leak of one round of the program.
fn cuda_is_counted(runtime: Runtime) -> Outcome {
    let home = Home::new()?;
    let program = cuda_program(home.path(), runtime)?;
    let folder = home.path().to_string_lossy().into_owned();
    let mut program = Traced::start(&program, &[("LD_LIBRARY_PATH", &folder)])?;
    program.told("first")?;
    let before = program.snapshot()?;
    program.told("second")?;
    let now = program.snapshot()?;
    let grew = |kind: AllocationKind| now.live_bytes(&[kind]) - before.live_bytes(&[kind]);
    let more = |kind: AllocationKind| now.live_count(&[kind]) - before.live_count(&[kind]);
    assert_eq!(grew(AllocationKind::Device), 5 * MIB);
    assert_eq!(grew(AllocationKind::Pool), 2 * MIB);
    assert_eq!(grew(AllocationKind::Pinned), 3 * MIB);
    assert_eq!(
        grew(AllocationKind::DeviceMapped),
        8 * MIB,
        "mapped and not unmapped, although its handles were given up"
    );
    assert!(
        (more(AllocationKind::GraphExec) - 3.0).abs() < 1e-9,
        "{} graphs",
        more(AllocationKind::GraphExec)
    );
    assert!(more(AllocationKind::Handle).abs() < 1e-9);
    let places = program.places(Some(&before))?;
    let graphs = places
        .iter()
        .find(|place| place.function.starts_with("cu") && place.function.contains("GraphInstantiate"));
    let graphs = graphs.context("no graphs")?;
    assert!(graphs.called_in == "capture_graphs" && (graphs.more_count - 3.0).abs() < 1e-9, "{graphs:?}");
    let inside = places.iter().find(|place| {
        place.within.is_some()
            && place.memory == TracedMemory::Host
            && place.function == "malloc"
            && place.called_in == "capture_graphs"
    });
    assert_eq!(inside.context("what a graph costs on the host")?.more_bytes, 300_000);
    program.end()
}

#[test]
fn cuda_is_counted_through_a_shared_runtime() -> Outcome {
    cuda_is_counted(Runtime::Shared)
}

#[test]
fn cuda_is_counted_through_a_runtime_of_cuda_11() -> Outcome {
    cuda_is_counted(Runtime::SharedOld)
}

#[test]
fn cuda_is_counted_through_a_runtime_that_is_linked_into_the_program() -> Outcome {
    cuda_is_counted(Runtime::Linked)
}

#[test]
fn cuda_is_counted_through_a_runtime_of_any_name_that_a_library_opened_for_itself() -> Outcome {
    cuda_is_counted(Runtime::Opened)
}

#[test]
fn a_library_that_is_closed_is_not_called_any_more_where_it_was() -> Outcome {
    let home = Home::new()?;
    let program = cuda_program(home.path(), Runtime::Closed)?;
    let folder = home.path().to_string_lossy().into_owned();
    let mut program = Traced::start(&program, &[("LD_LIBRARY_PATH", &folder)])?;
    for round in 1..=3 {
        program.told(&format!("round {round}"))?;
        assert_eq!(program.snapshot()?.live_bytes(&[AllocationKind::Device]), round * 5 * MIB);
    }
    program.end()
}

#[test]
fn what_cuda_refuses_to_take_back_still_lives() -> Outcome {
    for runtime in [Runtime::Shared, Runtime::Linked] {
        let home = Home::new()?;
        let program = cuda_program(home.path(), runtime)?;
        let folder = home.path().to_string_lossy().into_owned();
        let mut program = Traced::start(&program, &[("LD_LIBRARY_PATH", &folder), ("REFUSE", "1")])?;
        program.told("once")?;
        let now = program.snapshot()?;
        let lives = |kind: AllocationKind| now.live_bytes(&[kind]) / MIB;
        assert_eq!(
            [lives(AllocationKind::Device), lives(AllocationKind::Pool), lives(AllocationKind::Pinned)],
            [12, 3, 4]
        );
        assert_eq!([lives(AllocationKind::DeviceMapped), lives(AllocationKind::Handle)], [16, 16]);
        assert!((now.live_count(&[AllocationKind::GraphExec]) - 6.0).abs() < 1e-9);
        program.end()?;
    }
    Ok(())
}

#[test]
fn an_allocation_that_fails_counts_as_none() -> Outcome {
    let home = Home::new()?;
    let program = cuda_program(home.path(), Runtime::Shared)?;
    let folder = home.path().to_string_lossy().into_owned();
    let mut program = Traced::start(&program, &[("LD_LIBRARY_PATH", &folder), ("FAIL", "1")])?;
    program.told("once")?;
    assert_eq!(program.snapshot()?.live_bytes(&[AllocationKind::Device]), 0);
    program.end()
}
