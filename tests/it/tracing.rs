//! The tracer, preloaded into programs whose allocations are known: what it says of them is so, within what sampling may
//! be off, and programs do not notice it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use warden_rig::home::Ran;
use warden_rig::{Context as _, Home, Outcome, Trouble, binaries};
use warden_tracer_reader::{
    INTERVAL_VARIABLE, Kind, Memory, Modules, Place, Snapshot, Symbols, VARIABLE, file_of, places,
    write_library,
};

/// Bytes between samples, so that a few megabytes are some thousand samples.
const INTERVAL: &str = "4096";
const MIB: i64 = 1 << 20;

/// A program under the tracer that does what lines say and answers `done`.
struct Traced {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    home: Home,
}

impl Traced {
    fn start(program: &Path, variables: &[(&str, &str)]) -> Result<Self, Trouble> {
        let home = Home::new()?;
        let library = write_library(home.path())?;
        let mut child = Command::new(program)
            .env(VARIABLE, home.path())
            .env(INTERVAL_VARIABLE, INTERVAL)
            .env("LD_PRELOAD", library)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context(program.display())?;
        let (to, from) = (child.stdin.take(), child.stdout.take().context("no output")?);
        Ok(Self { child, to, from: BufReader::new(from), home })
    }

    fn leaky() -> Result<Self, Trouble> {
        Self::start(&binaries::leaky()?, &[])
    }

    fn told(&mut self, line: &str) -> Outcome {
        writeln!(self.to.as_mut().context("no input")?, "{line}")?;
        let mut answer = String::new();
        self.from.read_line(&mut answer)?;
        assert_eq!(answer, "done\n", "{line}");
        Ok(())
    }

    fn snapshot(&self) -> Result<Snapshot, Trouble> {
        Ok(Snapshot::read(&file_of(self.home.path(), self.child.id()))?)
    }

    fn places(&self, before: Option<&Snapshot>) -> Result<Vec<Place>, Trouble> {
        let modules = Modules::of(self.child.id());
        Ok(places(before, &self.snapshot()?, &modules, &mut Symbols::default()))
    }

    /// What lives at the places of this function.
    fn lives_at(&self, function: &str) -> Result<(i64, f64), Trouble> {
        let named = |name: &str| name.rsplit("::").find(|part| !part.contains("closure")) == Some(function);
        let of_function =
            |place: &Place| place.chain.iter().filter_map(|frame| frame.function.as_deref()).any(named);
        let found: Vec<Place> = self.places(None)?.into_iter().filter(of_function).collect();
        assert!(!found.is_empty(), "no place {function}: {:?}", self.names()?);
        Ok(found
            .iter()
            .fold((0, 0.0), |(bytes, count), place| (bytes + place.live_bytes, count + place.live_count)))
    }

    fn names(&self) -> Result<Vec<String>, Trouble> {
        Ok(self
            .places(None)?
            .into_iter()
            .map(|place| format!("{} in {}", place.function, place.called_in))
            .collect())
    }

    /// It ends by itself, and well.
    fn end(mut self) -> Outcome {
        self.to.take();
        let status = self.child.wait()?;
        assert!(status.success(), "{status}");
        Ok(())
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Whether an estimate is as near as it has to be: five times the standard error of a sample of so many bytes, which for
/// small blocks is one part in the root of the number of samples.
fn near(estimate: i64, truth: i64) -> bool {
    #[expect(clippy::cast_precision_loss, reason = "megabytes")]
    let (estimate, truth) = (estimate as f64, truth as f64);
    (estimate - truth).abs() <= 5.0 * (truth * 4096.0).sqrt()
}

#[test]
fn leaks_of_small_blocks_are_estimated_and_what_is_freed_is_forgotten() -> Outcome {
    let mut program = Traced::leaky()?;
    program.told("churn 100000 300")?;
    let before = program.snapshot()?;
    program.told("small 200000 48")?;
    program.told("churn 300000 300")?;
    program.told("handed 20000 500")?;
    let (bytes, count) = program.lives_at("leak_small")?;
    assert!(near(bytes, 200_000 * 48), "{bytes} bytes");
    assert!((count - 200_000.0).abs() < 200_000.0 * 0.15, "{count} blocks");
    assert_eq!(program.lives_at("churn")?.0, 0, "all of it was freed");
    assert_eq!(program.lives_at("hand_over")?.0, 0, "another thread freed it");
    let grown = program.places(Some(&before))?;
    assert_eq!(grown[0].called_in, "leaky::leak_small", "it grew most since the snapshot");
    assert!(near(grown[0].more_bytes, 200_000 * 48) && grown[0].memory == Memory::Host);
    program.end()
}

#[test]
fn large_blocks_are_counted_one_by_one_whichever_function_made_them() -> Outcome {
    let mut program = Traced::leaky()?;
    program.told("large 10 1048576")?;
    program.told("zeroed 5 2097152")?;
    program.told("aligned 3 1048576")?;
    program.told("grow 8388608")?;
    assert_eq!(program.lives_at("leak_large")?, (10 * MIB, 10.0));
    assert_eq!(program.lives_at("leak_zeroed")?, (10 * MIB, 5.0));
    assert_eq!(program.lives_at("leak_aligned")?, (3 * MIB, 3.0));
    assert_eq!(program.lives_at("grow")?, (8 * MIB, 1.0), "what was there before it grew is gone");
    let functions: Vec<String> = program.names()?;
    for name in ["calloc in leaky::leak_zeroed", "realloc in leaky::grow", "malloc in leaky::leak_large"] {
        assert!(functions.iter().any(|function| function == name), "{name}: {functions:?}");
    }
    program.end()
}

#[test]
fn threads_are_counted_together() -> Outcome {
    let mut program = Traced::leaky()?;
    program.told("threads 50000 64")?;
    let (bytes, _) = program.lives_at("leak_small")?;
    assert!(near(bytes, 4 * 50_000 * 64), "{bytes} bytes");
    program.end()
}

#[test]
fn mappings_are_counted_and_end() -> Outcome {
    let mut program = Traced::leaky()?;
    program.told("mapped 4194304")?;
    program.told("unmapped 8388608")?;
    assert_eq!(program.lives_at("leak_mapping")?, (4 * MIB, 1.0));
    assert_eq!(program.lives_at("map_and_unmap")?, (0, 0.0));
    program.end()
}

#[test]
fn a_forked_child_counts_nothing_for_its_parent() -> Outcome {
    // A shell: what it puts in parentheses runs in a child that it forks.
    let bash = Path::new("/bin/bash");
    if !bash.exists() {
        return Ok(());
    }
    let mut shell = Traced::start(bash, &[])?;
    shell.told("( big=$(printf '%*s' 30000000 x); echo done )")?;
    let after_child = shell.snapshot()?.live_bytes(&[Kind::Heap, Kind::Mapped]);
    shell.told("printf -v big '%*s' 30000000 x; echo done")?;
    let after_itself = shell.snapshot()?.live_bytes(&[Kind::Heap, Kind::Mapped]);
    assert!(after_child < 8 * MIB, "the child's are not its own: {after_child}");
    assert!(after_itself > 24 * MIB, "its own are: {after_itself}");
    shell.end()
}

#[test]
fn nothing_is_written_and_nothing_changes_where_no_folder_is_named() -> Outcome {
    let home = Home::new()?;
    let library = write_library(home.path())?;
    for folder in [None, Some("/proc/nowhere")] {
        let mut command = Command::new(binaries::leaky()?);
        command.env("LD_PRELOAD", &library).env_remove(VARIABLE).stdin(Stdio::null());
        command.envs(folder.map(|folder| (VARIABLE, folder)));
        let ran = command.output()?;
        assert!(ran.status.success() && ran.stderr.is_empty(), "{ran:?}");
    }
    assert_eq!(
        std::fs::read_dir(home.path())?
            .filter_map(Result::ok)
            .filter(|entry| entry.path().extension().is_some_and(|end| end == "trace"))
            .count(),
        0
    );
    Ok(())
}

/// How the program finds the runtime.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Runtime {
    Shared,
    /// The same with the interface of CUDA 11.
    SharedOld,
    /// Linked into the program, as some builds have it.
    Linked,
}

fn cc(arguments: &[&str], folder: &Path) -> Outcome {
    let made = Command::new("cc").args(arguments).current_dir(folder).output()?;
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Ok(())
}

/// The program of `tests/fake-cuda` with its driver and runtime.
fn cuda_program(folder: &Path, runtime: Runtime) -> Result<PathBuf, Trouble> {
    let source = |name: &str| format!("{}/fake-cuda/{name}.c", env!("CARGO_MANIFEST_DIR"));
    let old = if runtime == Runtime::SharedOld { "-DOLD" } else { "-DNEW" };
    cc(
        &["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", &source("cuda")],
        folder,
    )?;
    if runtime == Runtime::Linked {
        cc(&["-O1", "-o", "program", &source("program"), &source("cudart"), "libcuda.so.1", "-ldl"], folder)?;
    } else {
        let soname = "-Wl,-soname,libcudart.so.12";
        cc(
            &["-O1", "-shared", "-fPIC", old, soname, "-o", "libcudart.so.12", &source("cudart"), "-ldl"],
            folder,
        )?;
        cc(&["-O1", old, "-o", "program", &source("program"), "libcudart.so.12", "libcuda.so.1"], folder)?;
    }
    Ok(folder.join("program"))
}

/// One round of the program leaks exactly this, however it is linked.
fn cuda_is_counted(runtime: Runtime) -> Outcome {
    let home = Home::new()?;
    let program = cuda_program(home.path(), runtime)?;
    let folder = home.path().to_string_lossy().into_owned();
    let mut program = Traced::start(&program, &[("LD_LIBRARY_PATH", &folder)])?;
    program.told("first")?;
    let before = program.snapshot()?;
    program.told("second")?;
    let now = program.snapshot()?;
    let grew = |kind: Kind| now.live_bytes(&[kind]) - before.live_bytes(&[kind]);
    let more = |kind: Kind| now.live_count(&[kind]) - before.live_count(&[kind]);
    assert_eq!(grew(Kind::Device), 5 * MIB);
    assert_eq!(grew(Kind::Pool), 2 * MIB);
    assert_eq!(grew(Kind::Pinned), 3 * MIB);
    assert_eq!(
        grew(Kind::DeviceMapped),
        8 * MIB,
        "mapped and not unmapped, although its handles were given up"
    );
    assert!((more(Kind::GraphExec) - 3.0).abs() < 1e-9, "{} graphs", more(Kind::GraphExec));
    assert!(more(Kind::Handle).abs() < 1e-9);
    let places = program.places(Some(&before))?;
    let graphs = places
        .iter()
        .find(|place| place.function.starts_with("cu") && place.function.contains("GraphInstantiate"));
    let graphs = graphs.context("no graphs")?;
    assert!(graphs.called_in == "capture_graphs" && (graphs.more_count - 3.0).abs() < 1e-9, "{graphs:?}");
    let inside = places.iter().find(|place| {
        place.within.is_some()
            && place.memory == Memory::Host
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
fn an_allocation_that_fails_counts_as_none() -> Outcome {
    let home = Home::new()?;
    let program = cuda_program(home.path(), Runtime::Shared)?;
    let folder = home.path().to_string_lossy().into_owned();
    let mut program = Traced::start(&program, &[("LD_LIBRARY_PATH", &folder), ("FAIL", "1")])?;
    program.told("once")?;
    assert_eq!(program.snapshot()?.live_bytes(&[Kind::Device]), 0);
    program.end()
}

/// `diagnose` with a fake-llama that leaks 3,000 KiB for each request.
async fn diagnose(home: &mut Home, options: &[&str]) -> Result<Ran, Trouble> {
    home.file("model.gguf", "GGUF")?;
    let script = home.file("script.json", r#"{"leak_kib_per_request": 3000}"#)?;
    home.env.insert("FAKE_LLAMA_SCRIPT".into(), script.into());
    let fake = binaries::fake_llama()?.to_string_lossy().into_owned();
    let before = ["diagnose", "--binary", &fake, "--workload", "short-text"];
    let after = ["--", "-m", "model.gguf", "--cache-ram", "0"];
    home.warden([&before, options, &after].concat(), PATIENCE).await
}

/// A leg on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

#[tokio::test]
async fn a_diagnosis_that_is_traced_names_the_function_that_leaks() -> Outcome {
    let mut home = Home::new()?;
    let ran = diagnose(&mut home, &["--trace"]).await?;
    assert_eq!(ran.code, 3, "{}", ran.all());
    let line = |start: &str| ran.stdout.lines().find(|line| line.contains(start)).map(str::to_owned);
    let growth = line("short-text: host memory grows by").context(ran.all())?;
    assert!(growth.contains("2.9 MiB a request, of which counted allocations make up 2.9 MiB"), "{growth}");
    let place = line(" × malloc").context(ran.all())?;
    assert!(place.contains("2.9 MiB") && place.contains("called in fake_llama::"), "{place}");
    assert!(line(" < ").is_some_and(|chain| chain.contains("::leak::Leak::")), "{}", ran.stdout);
    let json = diagnose(&mut home, &["--trace", "--json"]).await?;
    let json: serde_json::Value = serde_json::from_str(&json.stdout)?;
    let traced = &json["trace"][0];
    assert_eq!(
        (&traced["workload"], &traced["memories"][0]["memory"]),
        (&"short-text".into(), &"host".into())
    );
    let explained = traced["memories"][0]["explained"].as_f64().unwrap_or_default();
    assert!(explained > 0.9, "{explained}");
    assert!(json["legs"][0]["series"][0]["verdict"] == "leaking", "the report is there as without it");
    Ok(())
}

#[tokio::test]
async fn under_a_tool_the_experiment_is_the_same_and_the_tool_sees_the_end_of_the_server() -> Outcome {
    let mut home = Home::new()?;
    let tool = home.file(
        "tool",
        "#!/bin/sh\nfolder=$1\nshift\n\"$@\"\necho \"it ended with $?: $*\" >\"$folder/seen by tool\"\n",
    )?;
    std::fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let folder = home.path().to_string_lossy().into_owned();
    let wrap = format!("{} '{folder}'", tool.display());
    let ran = diagnose(&mut home, &["--wrap", &wrap]).await?;
    assert_eq!(ran.code, 3, "{}", ran.all());
    let seen = std::fs::read_to_string(home.path().join("seen by tool")).context(ran.all())?;
    assert!(seen.starts_with("it ended with 0: ") && seen.contains("fake-llama -m model.gguf"), "{seen}");
    Ok(())
}

#[tokio::test]
async fn a_tool_that_is_not_installed_and_a_library_that_is_not_there_are_named() -> Outcome {
    let mut home = Home::new()?;
    let ran = diagnose(&mut home, &["--wrap", "compute-sanitizer-of-nowhere --tool memcheck"]).await?;
    assert!(
        ran.code == 1 && ran.stderr.contains("compute-sanitizer-of-nowhere is not installed"),
        "{}",
        ran.all()
    );
    let ran = diagnose(&mut home, &["--trace", "--tracer", "nowhere.so"]).await?;
    assert!(ran.code == 1 && ran.stderr.contains("--tracer"), "{}", ran.all());
    Ok(())
}
