//! The tracer in programs with known allocations: its results are right within the sampling error, and the
//! programs are unaffected.

mod cuda;
mod diagnose;
mod unnoticed;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use warden_rig::{Context as _, Home, Outcome, Trouble, binaries};
use warden_tracer_reader::{
    AllocationKind, AllocationPlace, ProcessModules, SymbolTables, TRACE_VARIABLE, TraceSnapshot,
    TracedMemory, group_by_place, write_library,
};

/// Bytes between samples: a few megabytes give some thousand samples.
const INTERVAL: &str = "4096";
const MIB: i64 = 1 << 20;

/// A traced program that executes lines and answers `done`.
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
            .env(TRACE_VARIABLE, home.path())
            .env("LLAMA_WARDEN_TRACE_INTERVAL", INTERVAL)
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

    fn file(&self) -> PathBuf {
        self.home.path().join(format!("{}.trace", self.child.id()))
    }

    fn snapshot(&self) -> Result<TraceSnapshot, Trouble> {
        Ok(TraceSnapshot::read(&self.file())?)
    }

    fn places(&self, before: Option<&TraceSnapshot>) -> Result<Vec<AllocationPlace>, Trouble> {
        let modules = ProcessModules::read(self.child.id());
        Ok(group_by_place(before, &self.snapshot()?, &modules, &mut SymbolTables::default()))
    }

    /// Live bytes and allocations at the places of this function.
    fn lives_at(&self, function: &str) -> Result<(i64, f64), Trouble> {
        let named = |name: &str| name.rsplit("::").find(|part| !part.contains("closure")) == Some(function);
        let of_function = |place: &AllocationPlace| {
            place.chain.iter().filter_map(|frame| frame.function.as_deref()).any(named)
        };
        let found: Vec<AllocationPlace> = self.places(None)?.into_iter().filter(of_function).collect();
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

    /// Ends the program, which must succeed.
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

/// Returns true if an estimate is within five standard errors. For small blocks, the relative error is one
/// divided by the root of the number of samples.
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
    assert!(near(grown[0].more_bytes, 200_000 * 48) && grown[0].memory == TracedMemory::Host);
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
fn what_could_not_be_given_back_still_lives() -> Outcome {
    let mut program = Traced::leaky()?;
    program.told("refused 4194304")?;
    assert_eq!(program.lives_at("leak_refused")?, (8 * MIB, 2.0), "a mapping and a block");
    program.end()
}

#[test]
fn mappings_that_end_in_parts_or_are_replaced_or_moved_are_what_they_are() -> Outcome {
    let mut program = Traced::leaky()?;
    program.told("parts 8388608")?;
    program.told("replaced 4194304")?;
    program.told("moved 4194304")?;
    // The kernel maps a whole page.
    program.told("mapped 1")?;
    assert_eq!(program.lives_at("leak_parts")?.0, 4 * MIB);
    assert_eq!(program.lives_at("leak_replaced")?, (4 * MIB, 1.0));
    assert_eq!(program.lives_at("leak_moved")?, (8 * MIB, 1.0));
    let page = i64::try_from(rustix::param::page_size())?;
    assert_eq!(program.lives_at("leak_mapping")?, (page, 1.0));
    program.end()
}

#[test]
fn every_function_that_allocates_is_counted_and_does_what_it_did() -> Outcome {
    let mut program = Traced::leaky()?;
    program.told("families 1048576")?;
    assert_eq!(program.lives_at("leak_families")?, (7 * MIB, 7.0));
    let functions = program.names()?;
    for name in ["posix_memalign", "aligned_alloc", "memalign", "realloc", "calloc"] {
        let line = format!("{name} in leaky::leak_families");
        assert!(functions.contains(&line), "{line}: {functions:?}");
    }
    program.end()
}

#[test]
fn what_threads_leave_behind_is_counted_also_what_they_take_while_they_end() -> Outcome {
    let mut program = Traced::leaky()?;
    program.told("ended 20 1048576")?;
    assert_eq!(program.lives_at("leak_before_ending")?, (20 * MIB, 20.0));
    assert_eq!(program.lives_at("leak_while_ending")?, (20 * MIB, 20.0));
    // The program allocates once more at its exit, and must succeed.
    program.told("atexit 1048576")?;
    program.end()
}

#[test]
fn a_signal_in_the_middle_of_counting_breaks_nothing() -> Outcome {
    let mut program = Traced::leaky()?;
    program.told("signals 20000 65536")?;
    assert_eq!(program.lives_at("map_and_unmap")?, (0, 0.0));
    assert_eq!(program.snapshot()?.losses.unfollowed, 0);
    program.end()
}

#[test]
fn children_count_nothing_for_their_parent_and_new_programs_count_for_themselves() -> Outcome {
    let mut program = Traced::leaky()?;
    program.told("large 3 1048576")?;
    program.told("forked 5 1048576")?;
    program.told("spawned 5 1048576")?;
    assert_eq!(program.lives_at("leak_large")?, (3 * MIB, 3.0));
    assert!(!program.names()?.iter().any(|name| name.contains("leak_mapping")), "{:?}", program.names()?);
    let mut others = Vec::new();
    for entry in std::fs::read_dir(program.home.path())? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "trace") && path != program.file() {
            others.push(TraceSnapshot::read(&path)?);
        }
    }
    assert_eq!(others.len(), 1, "the one that was forked has none");
    assert!(others[0].live_bytes(&[AllocationKind::Heap]) >= 5 * MIB);
    // The trace of an ended process is not read.
    assert_eq!(TraceSnapshot::all_in(program.home.path())?.len(), 1);
    program.end()
}

#[test]
fn a_file_that_another_process_of_the_same_number_has_mapped_is_not_made_shorter() -> Outcome {
    let home = Home::new()?;
    let library = write_library(home.path())?;
    let line = "ln $FOLDER/other $FOLDER/$$.trace && LD_PRELOAD=$LIBRARY exec true";
    std::fs::write(home.path().join("other"), "of another")?;
    let ran = Command::new("sh")
        .args(["-c", line])
        .envs([("FOLDER", home.path()), ("LIBRARY", &library)])
        .env(TRACE_VARIABLE, home.path())
        .output()?;
    assert!(ran.status.success(), "{ran:?}");
    assert_eq!(std::fs::read_to_string(home.path().join("other"))?, "of another");
    let published = std::fs::read_dir(home.path())?.filter_map(|entry| {
        Some(entry.ok()?.path()).filter(|path| path.extension().is_some_and(|end| end == "trace"))
    });
    for path in published {
        assert_eq!(TraceSnapshot::read(&path)?.losses.unfollowed, 0);
    }
    Ok(())
}

#[test]
fn a_program_with_an_allocator_of_its_own_is_told_as_such() -> Outcome {
    const SOURCE: &str = r#"
#include <stdio.h>
void *reallocarray(void *, unsigned long, unsigned long);
static char room[1 << 20];
static unsigned long used;
void *malloc(unsigned long n) { void *at = room + used; used += (n + 15) & ~15ul; return at; }
void free(void *at) { (void)at; }
void *calloc(unsigned long n, unsigned long m) { return malloc(n * m); }
void *realloc(void *at, unsigned long n) { (void)at; return malloc(n); }
int main(void) {
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        /* A function of the C library that it has not, and which comes back to what it has. */
        char *at = reallocarray(0, 3, 100);
        if (at < room || at >= room + sizeof room || reallocarray(at, ~0ul, 2)) return 1;
        puts("done");
        fflush(stdout);
    }
    return 0;
}
"#;
    let home = Home::new()?;
    std::fs::write(home.path().join("own.c"), SOURCE)?;
    cc(&["-O1", "-fno-builtin", "-o", "own", "own.c"], home.path())?;
    let mut program = Traced::start(&home.path().join("own"), &[])?;
    program.told("anything")?;
    assert!(program.snapshot()?.own_heap);
    program.end()?;
    let mut leaky = Traced::leaky()?;
    leaky.told("small 1 1")?;
    assert!(!leaky.snapshot()?.own_heap);
    leaky.end()
}

#[test]
fn a_forked_child_counts_nothing_for_its_parent() -> Outcome {
    // The shell forks a child for commands in parentheses.
    let bash = Path::new("/bin/bash");
    if !bash.exists() {
        return Ok(());
    }
    let mut shell = Traced::start(bash, &[])?;
    shell.told("( big=$(printf '%*s' 30000000 x); echo done )")?;
    let after_child = shell.snapshot()?.live_bytes(&[AllocationKind::Heap, AllocationKind::Mapped]);
    shell.told("printf -v big '%*s' 30000000 x; echo done")?;
    let after_itself = shell.snapshot()?.live_bytes(&[AllocationKind::Heap, AllocationKind::Mapped]);
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
        command.env("LD_PRELOAD", &library).env_remove(TRACE_VARIABLE).stdin(Stdio::null());
        command.envs(folder.map(|folder| (TRACE_VARIABLE, folder)));
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

fn cc(arguments: &[&str], folder: &Path) -> Outcome {
    let made = Command::new("cc").args(arguments).current_dir(folder).output()?;
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Ok(())
}
