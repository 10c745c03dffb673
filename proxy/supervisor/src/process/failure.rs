//! Classifies a failed start by the process's exit and output.
//!
//! The phrases come from llama-server and the dynamic loader. The first matching kind wins, so causes are
//! checked before consequences: a model that does not fit also "fails to load". Warnings are ignored, because
//! the process continued after them.

use std::time::Duration;

use crate::error::{BackendFailure, FailureKind, SpawnError};
use crate::process::group::ProcessExit;
use crate::spec::ServerKind;

#[derive(Debug)]
pub(crate) enum StartEnd<'a> {
    NotSpawned(&'a SpawnError),
    /// Exit and, after a SIGKILL, evidence of a lack of memory.
    Exited(ProcessExit, OomEvidence),
    TimedOut(StartLateness),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StartLateness {
    NotReady(Duration),
    Stalled(Duration),
    /// The socket was removed after it had answered.
    SocketRemoved,
}

/// Evidence of the kernel's OOM killer, read after a SIGKILL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OomEvidence {
    #[default]
    Unknown,
    No,
    /// The kernel killed a process of the same control group or of a parent group.
    Group,
    /// The kernel killed some process of this machine.
    Machine,
}

const BAD_FLAG_PHRASES: &[&str] =
    &["error: invalid argument", "error while handling argument", "error: unknown argument"];
const NO_HTTPS_PHRASES: &[&str] = &["https is not supported", "built without libcurl", "built without ssl"];
const NO_LIBRARY_PHRASES: &[&str] = &["error while loading shared libraries"];
const ADDRESS_PHRASES: &[&str] = &["couldn't bind", "address already in use"];
const NO_MEMORY_PHRASES: &[&str] = &[
    "out of memory",
    "insufficient memory",
    "failed to allocate",
    "cannot allocate memory",
    "std::bad_alloc",
    "unable to allocate",
    "erroroutofdevicememory",
    "erroroutofhostmemory",
];
const BAD_MODEL_PHRASES: &[&str] = &[
    "failed to open gguf",
    "invalid magic",
    "failed to read magic",
    "model is corrupted or incomplete",
    "unknown model architecture",
];
/// Messages with many possible causes, some temporary: no device memory, an unreachable network drive.
const NOT_LOADED_PHRASES: &[&str] = &[
    "error loading model",
    "failed to load model",
    "failed to load multimodal model",
    "failed to load lora adapter",
];

const ABORT_PHRASES: &[&str] = &["ggml_assert", "ggml_abort", "terminate called", "what():", "cuda error"];

/// First line that reports a crash. The line may be a client's text, so callers also probe the process.
pub(crate) fn crash_line(lines: &[String]) -> Option<String> {
    lines.iter().find(|line| is_crash(line)).map(|line| readable_line(line))
}

pub(crate) fn is_crash(line: &str) -> bool {
    contains_phrase(line, ABORT_PHRASES)
}

fn contains_phrase(line: &str, phrases: &[&str]) -> bool {
    let line = line.to_ascii_lowercase();
    phrases.iter().any(|phrase| line.contains(phrase))
}

/// Classifies the end of a process that was not ready or has crashed. The failure shows the last `keep`
/// lines.
pub(crate) fn classify_end(
    server: &ServerKind,
    end: &StartEnd<'_>,
    lines: &[String],
    keep: usize,
    failures: u32,
) -> BackendFailure {
    let (kind, message) = match (end, server) {
        (StartEnd::NotSpawned(error), _) => spawn_failure(error),
        (StartEnd::TimedOut(lateness), ServerKind::LlamaServer) => {
            (FailureKind::Timeout, lateness_message(*lateness))
        }
        (StartEnd::TimedOut(lateness), ServerKind::OtherProgram(check)) => {
            let message = format!(
                "{}; it has to listen on the port or socket that its command names, and to answer `GET {}`",
                lateness_message(*lateness),
                check.path
            );
            (FailureKind::Timeout, message)
        }
        (StartEnd::Exited(exit, why), ServerKind::LlamaServer) => exit_failure(*exit, *why, lines),
        (StartEnd::Exited(exit, why), ServerKind::OtherProgram(_)) => program_failure(*exit, *why, lines),
    };
    let lines = lines[lines.len().saturating_sub(keep)..].to_vec();
    BackendFailure { kind, message, lines, failures }
}

fn lateness_message(lateness: StartLateness) -> String {
    let (what, after, key) = match lateness {
        StartLateness::NotReady(after) => ("was not ready within", after, "start_timeout"),
        StartLateness::Stalled(after) => {
            ("logged, wrote, read and computed nothing for", after, "start_stall")
        }
        StartLateness::SocketRemoved => {
            return "its socket was removed while it started, so no request could reach it: what cleans the \
                    runtime directory?"
                .to_owned();
        }
    };
    let seconds = after.as_secs_f64();
    format!(
        "it {what} {seconds:.0} s: give it more time with `{key}`, or look at its output for what it waits for"
    )
}

fn spawn_failure(error: &SpawnError) -> (FailureKind, String) {
    use FailureKind::{Exit, NotExecutable, OutOfMemory};
    let errno = if let SpawnError::Exec { source, .. } = error { source.raw_os_error() } else { None };
    let (kind, hint) = match (error, errno) {
        (SpawnError::Directory { .. }, _) => (NotExecutable, "check the working directory"),
        (SpawnError::Sockets { .. }, _) => {
            (Exit, "remove what is in its place, or choose another `paths.runtime_dir`")
        }
        (_, Some(libc::ENOENT)) => {
            (NotExecutable, "the file, or the loader it names, does not exist: check the path of the binary")
        }
        (_, Some(libc::EACCES | libc::EPERM)) => {
            (NotExecutable, "make it executable (chmod +x) and its directories accessible")
        }
        (_, Some(libc::ENOEXEC)) => (NotExecutable, "it is not a program for this machine"),
        (_, Some(libc::ENOTDIR | libc::EISDIR | libc::ELOOP)) => {
            (NotExecutable, "check the path of the binary")
        }
        (_, Some(libc::ENOMEM)) => (OutOfMemory, "there is no memory for another process"),
        (_, Some(libc::EAGAIN)) => (Exit, "this account may not have more processes (ulimit -u)"),
        (_, Some(libc::EMFILE | libc::ENFILE)) => (Exit, "too many files are open (ulimit -n)"),
        _ => (Exit, "it is tried again"),
    };
    (kind, format!("{error}; {hint}"))
}

/// True if a line reports no error, by its level (`0.00.004.314 W `), its first words, or known text.
fn is_warning(line: &str) -> bool {
    if let (Some(level), _) = split_level(line) {
        return matches!(level, "W" | "I" | "D");
    }
    let line = line.trim_start().to_ascii_lowercase();
    line.starts_with("warn") || line.contains("failed to mlock") || line.contains("pinned memory")
}

fn exit_failure(exit: ProcessExit, why: OomEvidence, lines: &[String]) -> (FailureKind, String) {
    let errors: Vec<&String> = lines.iter().filter(|line| !is_warning(line)).collect();
    // The first match is the cause; later lines are consequences.
    let find = |phrases: &[&str]| {
        errors.iter().find(|line| contains_phrase(line, phrases)).map(|line| readable_line(line))
    };
    let last = |phrases: &[&str]| errors.iter().rposition(|line| contains_phrase(line, phrases));
    if let Some(line) = find(NO_LIBRARY_PHRASES) {
        let hint = "install the library or set `LD_LIBRARY_PATH` in the model's `env`";
        return (FailureKind::MissingLibrary, format!("a shared library is missing ({line}): {hint}"));
    }
    if let Some(line) = find(NO_HTTPS_PHRASES) {
        let hint = "build one that can (`llama-warden build --plan` says what is missing here), or fetch the file \
                    yourself and give its path with -m";
        return (FailureKind::BadModel, format!("this llama-server cannot fetch models ({line}): {hint}"));
    }
    if let Some(line) = find(BAD_FLAG_PHRASES) {
        let hint = "correct the model's arguments; `llama-server --help` lists them";
        return (FailureKind::BadFlag, format!("llama-server does not take an argument ({line}): {hint}"));
    }
    if let Some(line) = find(ADDRESS_PHRASES) {
        return (
            FailureKind::Address,
            format!("it could not listen on its socket ({line}): check `runtime_dir`"),
        );
    }
    // A bad model reported later is the reason: another device may have had enough memory.
    if let Some(index) =
        last(NO_MEMORY_PHRASES).filter(|index| last(BAD_MODEL_PHRASES).is_none_or(|other| other <= *index))
    {
        let line = readable_line(errors[index]);
        let hint = "use a smaller context (-c), fewer layers on the GPU (-ngl) or a smaller quantization";
        return (FailureKind::OutOfMemory, format!("memory ran out ({line}): {hint}"));
    }
    if exit == ProcessExit::Signal(libc::SIGKILL) {
        return kill_failure(exit, why);
    }
    if let Some(line) = find(BAD_MODEL_PHRASES) {
        let hint = "check the path and that the file is a whole GGUF model that this llama-server knows";
        return (FailureKind::BadModel, format!("the model could not be loaded ({line}): {hint}"));
    }
    if let Some(line) = find(NOT_LOADED_PHRASES) {
        let hint = "its output may tell why; a file or memory that is missing may be there the next time";
        return (FailureKind::NotLoaded, format!("the model could not be loaded ({line}): {hint}"));
    }
    let message = match (exit, find(ABORT_PHRASES)) {
        (ProcessExit::Signal(_), line) => {
            let told = line.map_or("; its last lines may tell why".to_owned(), |line| format!(" ({line})"));
            return (FailureKind::Signal, format!("it died of {exit}{told}"));
        }
        (ProcessExit::Code(0), _) => format!(
            "it ended by itself with {exit}; its last lines may tell why. Where the binary is a script that left its \
             server running elsewhere: end it with `exec llama-server \"$@\"`, or run the container in the foreground \
             (without `-d`)"
        ),
        _ => format!("it ended by itself with {exit}; its last lines may tell why"),
    };
    (FailureKind::Exit, message)
}

/// Classifies the exit of a program of which only words of the loader and of common allocators are known.
fn program_failure(exit: ProcessExit, why: OomEvidence, lines: &[String]) -> (FailureKind, String) {
    let find = |phrases: &[&str]| {
        let found = lines.iter().find(|line| !is_warning(line) && contains_phrase(line, phrases));
        found.map(|line| readable_line(line))
    };
    if let Some(line) = find(NO_LIBRARY_PHRASES) {
        let hint = "install the library or set `LD_LIBRARY_PATH` in the model's `env`";
        return (FailureKind::MissingLibrary, format!("a shared library is missing ({line}): {hint}"));
    }
    if let Some(line) = find(NO_MEMORY_PHRASES) {
        return (
            FailureKind::OutOfMemory,
            format!("memory ran out ({line}): use a smaller model or context"),
        );
    }
    match exit {
        ProcessExit::Signal(libc::SIGKILL) => kill_failure(exit, why),
        ProcessExit::Signal(_) => {
            (FailureKind::Signal, format!("it died of {exit}; its last lines may tell why"))
        }
        ProcessExit::Code(0) => {
            let hint = "its last lines may tell why; `command` has to run the server in the foreground";
            (FailureKind::Exit, format!("it ended by itself with {exit}; {hint}"))
        }
        _ => (FailureKind::Exit, format!("it ended by itself with {exit}; its last lines may tell why")),
    }
}

fn kill_failure(exit: ProcessExit, why: OomEvidence) -> (FailureKind, String) {
    const USE_LESS_ADVICE: &str = "use a smaller context or model";
    let message = match why {
        OomEvidence::Group => format!(
            "the kernel killed it for lack of memory in its control group ({exit}): {USE_LESS_ADVICE}, or raise the \
             group's limit"
        ),
        OomEvidence::Machine => format!(
            "it was killed with {exit} when the kernel was killing for lack of memory (`dmesg` names the process): \
             {USE_LESS_ADVICE}"
        ),
        OomEvidence::No => format!(
            "it was killed by a person or a program with {exit}; the kernel killed no process for lack of memory"
        ),
        OomEvidence::Unknown => format!(
            "it was killed from outside with {exit}; `dmesg` shows if the kernel did so for lack of memory"
        ),
    };
    let is_shortage = matches!(why, OomEvidence::Group | OomEvidence::Machine);
    (if is_shortage { FailureKind::OutOfMemory } else { FailureKind::Signal }, message)
}

fn split_level(line: &str) -> (Option<&str>, &str) {
    let stamp = |word: &str| word.len() > 6 && word.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    let line = line.trim();
    let Some((first, after)) = line.split_once(' ') else { return (None, line) };
    if !stamp(first) {
        return (None, line);
    }
    let rest = after.trim_start();
    match rest.split_once(' ') {
        Some((level, after)) if level.len() == 1 => (Some(level), after.trim_start()),
        _ => (None, rest),
    }
}

fn readable_line(line: &str) -> String {
    const MAX_LINE_CHARS: usize = 200;
    let (_, rest) = split_level(line);
    if rest.chars().count() > MAX_LINE_CHARS {
        let cut: String = rest.chars().take(MAX_LINE_CHARS).collect();
        return format!("{cut}...");
    }
    rest.to_owned()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;
    use crate::spec::ReadyCheck;

    fn of(exit: ProcessExit, text: &str) -> BackendFailure {
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        classify_end(&ServerKind::LlamaServer, &StartEnd::Exited(exit, OomEvidence::Unknown), &lines, 2, 1)
    }

    #[test]
    fn what_llama_server_says_is_understood() {
        let mut told = String::new();
        for (code, text, kind) in [
            (1, "error: invalid argument: --bogus", FailureKind::BadFlag),
            (1, "error while handling argument \"-c\": stoi\n\nusage:\n", FailureKind::BadFlag),
            (
                1,
                "0.00.004.314 E gguf_init_from_file: failed to open GGUF file '/a.gguf' (No such file or directory)\n\
                 0.00.004.780 E srv  llama_server: exiting due to model loading error",
                FailureKind::BadModel,
            ),
            (
                1,
                "0.00.004.453 E llama_model_load: error loading model: tensor 'x' data is not within the file bounds, \
                 model is corrupted or incomplete",
                FailureKind::BadModel,
            ),
            (
                1,
                "0.00.024.396 E ggml_aligned_malloc: insufficient memory (attempted to allocate 3128.00 MB)\n\
                 0.00.024.685 E cmn  common_init_: failed to create context with model 'fat-kv.gguf'\n\
                 0.00.024.698 E srv  load_model: failed to load model",
                FailureKind::OutOfMemory,
            ),
            (1, "CUDA error: out of memory\n  failed to load model", FailureKind::OutOfMemory),
            (1, "E srv  start: couldn't bind HTTP server socket, hostname: /x.sock", FailureKind::Address),
            (
                127,
                "./llama-server: error while loading shared libraries: libcudart.so.12: cannot open shared object file",
                FailureKind::MissingLibrary,
            ),
            (
                1,
                "error while handling argument \"-hf\": HTTPS is not supported. Please rebuild with one of:\n  -DLLAMA_OPENSSL=ON",
                FailureKind::BadModel,
            ),
            (
                1,
                "common_load_model_from_hf: llama.cpp built without libcurl, downloading from Hugging Face not supported.",
                FailureKind::BadModel,
            ),
            (1, "E srv  load_model: failed to load model", FailureKind::NotLoaded),
            (7, "nothing of note", FailureKind::Exit),
        ] {
            let failure = of(ProcessExit::Code(code), text);
            assert_eq!(failure.kind, kind, "{text}");
            told.extend([failure.message.as_str(), "\n"]);
        }
        insta::assert_snapshot!(told);
    }

    #[test]
    fn a_death_by_signal_is_told_and_sigkill_means_lack_of_memory_only_where_the_kernel_counted_it() {
        let of_kill = |why| {
            let end = StartEnd::Exited(ProcessExit::Signal(9), why);
            classify_end(&ServerKind::LlamaServer, &end, &[], 2, 1)
        };
        let mut told = String::new();
        for (why, kind) in [
            (OomEvidence::Unknown, FailureKind::Signal),
            (OomEvidence::No, FailureKind::Signal),
            (OomEvidence::Group, FailureKind::OutOfMemory),
            (OomEvidence::Machine, FailureKind::OutOfMemory),
        ] {
            let failure = of_kill(why);
            assert_eq!(failure.kind, kind, "{why:?}");
            told.extend([failure.message.as_str(), "\n"]);
        }
        for line in ["GGML_ASSERT(n > 1) failed", "nothing of note"] {
            let failure = of(ProcessExit::Signal(6), line);
            assert_eq!(failure.kind, FailureKind::Signal);
            told.extend([failure.message.as_str(), "\n"]);
        }
        insta::assert_snapshot!(told);
    }

    #[test]
    fn a_warning_is_no_cause_and_the_last_error_wins() {
        let mlock = "warning: failed to mlock 1024-byte buffer (after previously locking 0 bytes): Cannot allocate memory";
        let leveled = "0.00.004.314 W llama_mlock: failed to mlock 1024-byte buffer: Cannot allocate memory";
        let pinned = "ggml_cuda_host_malloc: failed to allocate 512.00 MiB of pinned memory: out of memory";
        let bad = "0.00.024.698 E gguf_init_from_file: failed to open GGUF file '/a.gguf'";
        for warning in [mlock, leveled, pinned] {
            let failure = of(ProcessExit::Code(1), &format!("{warning}\n{bad}"));
            assert_eq!(failure.kind, FailureKind::BadModel, "{}", failure.message);
            assert_eq!(of(ProcessExit::Code(3), warning).kind, FailureKind::Exit, "{warning}");
        }
        let short =
            "0.00.024.396 E ggml_aligned_malloc: insufficient memory (attempted to allocate 3128.00 MB)";
        let not_loaded = "0.00.024.698 E srv  load_model: failed to load model";
        let kind = |lines: [&str; 3]| of(ProcessExit::Code(1), &lines.join("\n")).kind;
        assert_eq!(kind([short, bad, not_loaded]), FailureKind::BadModel);
        assert_eq!(kind([bad, short, not_loaded]), FailureKind::OutOfMemory);
    }

    #[test]
    fn the_end_of_another_program_is_told_without_advice_about_llama_server() {
        let check = ReadyCheck { path: "/ready".to_owned(), needs_success: true };
        let other = ServerKind::OtherProgram(check);
        let mut told = String::new();
        let late = StartEnd::TimedOut(StartLateness::NotReady(Duration::from_secs(9)));
        let exit = |exit| StartEnd::Exited(exit, OomEvidence::Unknown);
        for (end, line) in [
            (late, ""),
            (exit(ProcessExit::Code(2)), "error: unknown argument: --bogus"),
            (exit(ProcessExit::Code(0)), "started as a daemon"),
            (
                exit(ProcessExit::Code(1)),
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            ),
            (exit(ProcessExit::Code(127)), "server: error while loading shared libraries: libx.so.1"),
            (exit(ProcessExit::Signal(11)), ""),
            (exit(ProcessExit::Signal(9)), ""),
        ] {
            let failure = classify_end(&other, &end, &[line.to_owned()], 2, 1);
            told.extend([format!("{:?}: {}\n", failure.kind, failure.message)]);
        }
        insta::assert_snapshot!(told);
    }

    #[test]
    fn the_last_lines_are_kept() {
        assert_eq!(of(ProcessExit::Code(1), "a\nb\nc").lines, ["b", "c"]);
        assert!(
            of(ProcessExit::Code(0), "").message.contains("exec llama-server"),
            "a wrapper that left nothing to watch"
        );
        assert_eq!(of(ProcessExit::Code(1), "").lines, [""; 0]);
    }

    #[test]
    fn a_binary_that_cannot_run_is_a_permanent_failure_with_a_hint() {
        let of_errno = |errno| {
            let source = std::io::Error::from_raw_os_error(errno);
            let error = SpawnError::Exec { binary: PathBuf::from("/bin/nope"), source };
            classify_end(&ServerKind::LlamaServer, &StartEnd::NotSpawned(&error), &[], 5, 1)
        };
        let permanent = [libc::ENOENT, libc::EACCES, libc::ENOEXEC, libc::EISDIR].map(of_errno);
        let passing = [libc::ENOMEM, libc::EAGAIN, libc::EMFILE, libc::EIO].map(of_errno);
        assert!(permanent.iter().all(|failure| failure.kind.is_permanent()));
        assert!(!passing.iter().any(|failure| failure.kind.is_permanent()), "that may pass");
        let late = |server: &ServerKind, late| classify_end(server, &StartEnd::TimedOut(late), &[], 5, 1);
        let llama = ServerKind::LlamaServer;
        let time = Duration::from_secs(900);
        let [late, still, removed] =
            [StartLateness::NotReady(time), StartLateness::Stalled(time), StartLateness::SocketRemoved]
                .map(|why| late(&llama, why));
        let told = permanent.iter().chain(&passing).chain([&late, &still, &removed]);
        insta::assert_snapshot!(told.map(|failure| failure.message.clone() + "\n").collect::<String>());
    }
}
