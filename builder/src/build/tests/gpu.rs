//! GPU builds with toolkits made of scripts.

use super::*;
use crate::plan::ArchChoice;

const NVCC: &str = "echo 'Cuda compilation tools, release 13.0, V13.0.88'";

fn rig(programs: &[(&str, &str)]) -> Rig {
    let all: Vec<(&str, &str)> = [("nvcc", NVCC)].into_iter().chain(programs.iter().copied()).collect();
    let mut rig = Rig::new(&all);
    rig.request.backend = ComputeBackend::Cuda.into();
    rig.request.arch = ArchChoice { cpu: CpuTarget::Portable, gpu: vec!["90".into()] };
    rig
}

/// A ninja that writes this script as the server.
fn server(rig: &Rig, script: &str) -> String {
    let path = rig.folder.path().join("server");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    ninja(&format!("mkdir bin; cp {} bin/llama-server; chmod +x bin/llama-server", path.display()))
}

fn set_ninja(rig: &Rig, script: &str) {
    fs::write(rig.folder.path().join("bin/ninja"), format!("#!/bin/sh\n{script}\n")).unwrap();
}

fn notes(events: &mut tokio::sync::mpsc::UnboundedReceiver<BuildEvent>) -> String {
    let mut notes = String::new();
    while let Ok(event) = events.try_recv() {
        if let BuildEvent::Note(note) = event {
            notes.push_str(&note);
            notes.push('\n');
        }
    }
    notes
}

#[tokio::test]
async fn cmake_is_told_which_nvcc_was_found_and_for_what_it_compiles() {
    let rig = rig(&[("ninja", &ninja("exit 1"))]);
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    let BuilderError::Build { log, .. } = error else { unreachable!("{error}") };
    let text = fs::read_to_string(log).unwrap();
    let bin = rig.folder.path().join("bin");
    for told in [
        format!("-DCMAKE_CUDA_COMPILER={}", bin.join("nvcc").display()),
        format!("-DCMAKE_CUDA_HOST_COMPILER={}", bin.join("c++").display()),
        "-DGGML_CUDA=ON".into(),
        "-DCMAKE_CUDA_ARCHITECTURES=90".into(),
        "-DGGML_NATIVE=OFF".into(),
    ] {
        assert!(text.contains(&told), "{told} is not in {text}");
    }
}

#[tokio::test]
async fn a_missing_toolkit_is_told_before_anything_is_written() {
    let mut rig = Rig::new(&[]);
    rig.request.backend = ComputeBackend::Cuda.into();
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(matches!(error, BuilderError::Toolkit { backend: ComputeBackend::Cuda, .. }), "{error}");
    assert!(!rig.folder.path().join("cache").exists());
}

#[tokio::test]
async fn the_choice_of_auto_is_told() {
    let mut rig = Rig::new(&[("ninja", &ninja("exit 1"))]);
    let (reporter, mut events) = EventReporter::channel();
    rig.builder.reporter = reporter;
    rig.request.backend = BackendChoice::Auto;
    let plan = rig.builder.plan(&rig.request).await.unwrap();
    assert_eq!((plan.recipe.backend, plan.why.is_empty()), (ComputeBackend::Cpu, false));
    assert_eq!(notes(&mut events), format!("backend cpu: {}\n", plan.why));
    rig.request.backend = ComputeBackend::Cpu.into();
    assert_eq!(
        rig.builder.plan(&rig.request).await.unwrap().id,
        plan.id,
        "the same build, however it was chosen"
    );
}

#[tokio::test]
async fn a_library_that_is_not_there_is_named_in_the_hint() {
    let mut rig = rig(&[]);
    rig.request.jobs = None;
    let says =
        "echo 'x: error while loading shared libraries: libcublas.so.13: cannot open shared object file' >&2";
    set_ninja(&rig, &server(&rig, &format!("{says}; exit 127")));
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(error.hint().unwrap().contains("libcublas.so.13"), "{error}");
    rig.nothing_is_left();
}

#[tokio::test]
async fn without_a_driver_the_toolkits_stand_in_takes_its_place() {
    let mut rig = rig(&[]);
    let (reporter, mut events) = EventReporter::channel();
    rig.builder.reporter = reporter;
    let stub = rig.folder.path().join("lib64/stubs/libcuda.so");
    fs::create_dir_all(stub.parent().unwrap()).unwrap();
    fs::write(&stub, "a stand-in").unwrap();
    // The server searches the driver only in the first folder of the library path, and reports what it
    // found. The machine may have its own driver, which is larger.
    let script = "driver=\"${LD_LIBRARY_PATH%%:*}/libcuda.so.1\"; \
                  [ -e \"$driver\" ] && [ \"$(wc -c <\"$driver\")\" -lt 100 ] || \
                  { echo 'error while loading shared libraries: libcuda.so.1: no such file'; exit 127; }; \
                  echo \"with $(cat \"$driver\")\"; exit 1";
    set_ninja(&rig, &server(&rig, script));
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(error.to_string().contains("with a stand-in"), "{error}");
    assert!(notes(&mut events).contains("no NVIDIA driver"));
    rig.nothing_is_left();
}

#[tokio::test]
async fn a_gpu_that_the_build_is_not_for_is_hidden_while_it_is_verified() {
    let script = "echo \"sees <$CUDA_VISIBLE_DEVICES>, called with $*\"; exit 1";
    for (here, sees) in [("9.0", "sees <>"), ("8.6", "sees <-1>")] {
        let mut rig = rig(&[("nvidia-smi", &format!("echo {here}"))]);
        let (reporter, mut events) = EventReporter::channel();
        rig.builder.reporter = reporter;
        set_ninja(&rig, &server(&rig, &format!("unset X; {script}")));
        let message = rig.builder.build(&rig.request).await.unwrap_err().to_string();
        assert!(message.contains(sees) && message.contains("-ngl 99"), "{here}: {message}");
        assert_eq!(notes(&mut events).contains("need not run on this machine's GPU (86)"), here == "8.6");
    }
}
