//! Complete builds with shell scripts as cmake, ninja and compilers, which take no time and fail on demand.
//!
//! Builds with the real programs take minutes: see tests/it/build.rs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use warden_patches::SetSelection;

use super::*;
use crate::builder::BuilderDirs;
use crate::environment::BuildEnvironment;
use crate::error::BuilderError;
use crate::event::EventReporter;
use crate::machine::MachineNeeds;
use crate::plan::{BackendChoice, ComputeBackend, CpuTarget};
use crate::process::RunPriority;
use crate::source::BuildSource;
use crate::store::Provenance;

mod amx;
mod gpu;
mod page;
mod patched;

/// A builder that reports nothing, with its folders below `folder`.
pub(crate) fn builder_with(env: BuildEnvironment, folder: &std::path::Path) -> Builder {
    Builder {
        dirs: BuilderDirs { cache: folder.to_owned(), data: folder.join("data") },
        env,
        memory: || None,
        reporter: EventReporter::silent(),
        cancel: CancellationToken::new(),
    }
}

/// A simulated machine: a source, programs, and the folders of a build.
struct Rig {
    folder: tempfile::TempDir,
    builder: Builder,
    request: BuildRequest,
}

impl Rig {
    fn install(&self, plan: BuildPlan) {
        let binary = self.folder.path().join("binary");
        fs::write(&binary, "12345").unwrap();
        let provenance = Provenance {
            id: plan.id.clone(),
            plan,
            ..crate::store::tests::provenance(&[], "2026-01-01T00:00:00Z", 5)
        };
        self.builder.store().install(&binary, &provenance).unwrap();
    }

    fn new(programs: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_owned();
        for name in ["CMakeLists.txt", "ggml/CMakeLists.txt", "tools/server/CMakeLists.txt"] {
            let path = root.join("source").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        fs::create_dir(root.join("bin")).unwrap();
        let usual = [
            ("cc", "echo cc 1"),
            ("c++", "echo c++ 1"),
            ("cmake", "echo cmake version 3.25.1"),
            ("ninja", "echo 1.11"),
        ];
        for (name, script) in usual.iter().chain(programs) {
            let path = root.join("bin").join(name);
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let builder = Builder {
            dirs: BuilderDirs { cache: root.join("cache"), data: root.join("data") },
            // Programs that the scripts need.
            env: BuildEnvironment {
                path: format!("{}:/usr/bin:/bin", root.join("bin").display()).into(),
                ..BuildEnvironment::default()
            },
            memory: || None,
            reporter: EventReporter::silent(),
            cancel: CancellationToken::new(),
        };
        let request = BuildRequest {
            source: BuildSource::at(&root.join("source")).unwrap(),
            backend: ComputeBackend::Cpu.into(),
            arch: CpuTarget::Portable.into(),
            patches: SetSelection::default(),
            options: Vec::new(),
            jobs: Some(1),
            needs: MachineNeeds { disk: 0, memory: 0, memory_per_job: 1, memory_per_gpu_job: 1 },
            page_timeout: Duration::from_secs(600),
            verify_timeout: Duration::from_secs(60),
            priority: RunPriority::Inherited,
        };
        Self { folder, builder, request }
    }

    fn work(&self) -> usize {
        fs::read_dir(self.folder.path().join("cache/work")).map_or(0, Iterator::count)
    }

    fn nothing_is_left(&self) {
        assert_eq!(self.work(), 0, "work folders");
        assert_eq!(
            fs::read_dir(self.folder.path().join("data/builds")).map_or(0, Iterator::count),
            0,
            "builds"
        );
    }
}

/// A ninja that supports `--version` and otherwise runs this script.
fn ninja(script: &str) -> String {
    format!("[ \"$1\" = --version ] && echo 1.11 && exit; {script}")
}

#[tokio::test]
async fn the_first_compiler_error_is_told_with_the_path_of_the_log() {
    let script = ninja("echo '[1/2] Building a.o'; echo 'a.c:1:2: error: no'; echo after; exit 1");
    let mut rig = Rig::new(&[("ninja", &script)]);
    let (reporter, mut events) = EventReporter::channel();
    rig.builder.reporter = reporter;
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    let BuilderError::Build { phase: "compiling", excerpt, log, killed: false, no_room: false } = &error
    else {
        unreachable!("{error}");
    };
    assert_eq!(excerpt, "a.c:1:2: error: no\nafter");
    assert!(fs::read_to_string(log).unwrap().contains("[1/2] Building a.o\n"));
    rig.nothing_is_left();
    let mut progress = Vec::new();
    while let Ok(event) = events.try_recv() {
        if let BuildEvent::Progress { done, total, item } = event {
            progress.push((done, total, item));
        }
    }
    assert_eq!(progress, [(1, 2, "a".to_owned())]);
}

#[tokio::test]
async fn a_failing_cmake_is_told() {
    let script = "[ \"$1\" = --version ] && echo cmake version 4.0.0 && exit; echo 'CMake Error: no such thing'; exit 1";
    let rig = Rig::new(&[("cmake", script)]);
    let message = rig.builder.build(&rig.request).await.unwrap_err().to_string();
    assert!(message.starts_with("configuring failed:\nCMake Error: no such thing\nfull log: "), "{message}");
    rig.nothing_is_left();
}

#[tokio::test]
async fn a_compiler_that_was_killed_comes_with_a_hint_about_memory() {
    let rig = Rig::new(&[("ninja", &ninja("kill -9 $$"))]);
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(error.hint().unwrap().contains("--jobs 1"), "{error}");
}

#[tokio::test]
async fn a_binary_that_does_not_serve_never_reaches_the_store() {
    let script = ninja(
        "mkdir bin; printf '#!/bin/sh\\necho nonsense; exit 1\\n' > bin/llama-server; chmod +x bin/llama-server",
    );
    let rig = Rig::new(&[("ninja", &script)]);
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(matches!(error, BuilderError::Verify { check: "health", .. }), "{error}");
    rig.nothing_is_left();
}

#[tokio::test]
async fn a_cancelled_compilation_leaves_no_process_and_no_file() {
    let rig = Rig::new(&[]);
    let mark = rig.folder.path().join("pid");
    let script = ninja(&format!("setsid sleep 600 & echo $! > {}; wait", mark.display()));
    fs::write(rig.folder.path().join("bin/ninja"), format!("#!/bin/sh\n{script}\n")).unwrap();
    let (outcome, pid) = tokio::join!(rig.builder.build(&rig.request), async {
        let wait = async {
            while !fs::read_to_string(&mark).is_ok_and(|text| text.ends_with('\n')) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), wait).await.unwrap();
        rig.builder.cancel.cancel();
        fs::read_to_string(&mark).unwrap().trim().to_owned()
    });
    assert!(matches!(outcome.unwrap_err(), BuilderError::Cancelled));
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    assert!(stat.map_or(true, |stat| stat.contains(") Z ")), "the compiler still runs");
    rig.nothing_is_left();
}

#[tokio::test]
async fn too_little_disk_is_told_before_anything_is_written() {
    let mut rig = Rig::new(&[]);
    rig.request.needs.disk = u64::MAX;
    assert!(matches!(rig.builder.build(&rig.request).await, Err(BuilderError::Disk { .. })));
    assert!(!rig.folder.path().join("cache").exists() && !rig.folder.path().join("data").exists());
}

#[tokio::test]
async fn a_build_in_the_store_is_a_hit_and_nothing_runs() {
    let rig = Rig::new(&[("ninja", "exit 1")]);
    let plan = rig.builder.plan(&rig.request).await.unwrap();
    rig.install(plan);
    let built = rig.builder.build(&rig.request).await.unwrap();
    assert!(built.hit);
    assert_eq!(fs::read(built.binary).unwrap(), b"12345");
    assert!(!rig.folder.path().join("cache/logs").exists());
}

#[tokio::test]
async fn two_builds_of_one_plan_do_not_work_at_the_same_time() {
    let mut rig = Rig::new(&[("ninja", &ninja("exit 1"))]);
    let (reporter, mut events) = EventReporter::channel();
    rig.builder.reporter = reporter;
    let plan = rig.builder.plan(&rig.request).await.unwrap();
    let lock =
        FileLock::try_take(&work::lock_path(&rig.builder.dirs.cache, plan.id.as_str())).unwrap().unwrap();
    let (outcome, ()) = tokio::join!(rig.builder.build(&rig.request), async {
        while let Some(event) = events.recv().await {
            if matches!(event, BuildEvent::Waiting(_)) {
                break;
            }
        }
        assert_eq!(rig.work(), 0);
        drop(lock);
    });
    assert!(matches!(outcome, Err(BuilderError::Build { .. })));
}
