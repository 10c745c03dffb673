//! Checks the files that a process needs to start: binary, loader, libraries and model files.
//!
//! A file is reported missing only if that is certain, because a false alarm would keep a leaking process.
//! The start itself reports all other problems.

mod libraries;
pub(crate) mod read_ahead;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use serde::{Deserialize, Serialize};
use warden_policies::server_flags::normal_flag;

use crate::error::FailureKind;
use crate::process::hints;
use crate::spec::ServerCommand;

/// Flags of llama-server that name an existing GGUF file.
const MODEL_FLAGS: &[&str] = &[
    "-m",
    "--model",
    "-md",
    "--model-draft",
    "--spec-draft-model",
    "-mm",
    "--mmproj",
    "-mv",
    "--model-vocoder",
];
/// Flags of llama-server that name another existing file.
const OTHER_FILE_FLAGS: &[&str] = &[
    "--lora",
    "--control-vector",
    "--grammar-file",
    "-jf",
    "--json-schema-file",
    "--chat-template-file",
    "--api-key-file",
    "--ssl-key-file",
    "--ssl-cert-file",
];
/// With these flags, `--model` names the file that a download creates.
const DOWNLOAD_FLAGS: &[&str] =
    &["-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-mu", "--model-url", "-dr", "--docker-repo"];
const MODEL_VARIABLES: &[&str] = &["LLAMA_ARG_MODEL", "LLAMA_ARG_MMPROJ", "LLAMA_ARG_MODEL_DRAFT"];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NeedsCheck {
    /// State of each file and directory. A different state may change the result of a start.
    pub(crate) stamps: Vec<(PathBuf, Option<FileStamp>)>,
    /// First missing requirement; without it no start can succeed.
    pub(crate) missing: Option<MissingNeed>,
    /// Identity of the answers of a process started now.
    pub(crate) kin: Option<AnswerIdentity>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MissingNeed {
    pub(crate) kind: FailureKind,
    /// Sentence with the missing file, its use, and advice.
    pub(crate) message: String,
}

/// Everything on which a process's answers depend. A process with the same identity can continue an answer
/// of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerIdentity {
    /// Hash of the command, the binary with its libraries, and the model files.
    pub made_of: u64,
    /// Hash of the command and the model files, without the binary and its libraries.
    pub but_for_binary: u64,
    /// Answer limit in tokens for requests without their own limit; `None`: the context limits them.
    pub answer_tokens: Option<u64>,
}

/// State of a file, which changes when the file is replaced or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileStamp {
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
    modified: (i64, i64),
}

/// Checks the files; may block on a network disk. `running`: PID of a process with the same binary, whose
/// libraries the next process needs too.
pub(crate) fn check_needs(command: &ServerCommand, running: Option<u32>) -> NeedsCheck {
    let files = needed_files(command);
    let mut paths: Vec<PathBuf> = files.iter().map(|need| need.path.clone()).collect();
    paths.extend(absolute_binary(command));
    paths.extend(library_directories(command));
    // Installing a library updates the loader's cache.
    paths.push(libraries::LD_CACHE.into());
    let stamps = paths.into_iter().map(|path| {
        let stamp = file_stamp(&path);
        (path, stamp)
    });
    let mut libraries = Vec::new();
    let missing = missing_binary(command)
        .or_else(|| libraries::missing_library(command, &mut libraries))
        .or_else(|| files.iter().find_map(missing_file))
        .or_else(|| missing_library(running?));
    // Without a model file in the command, the next download may bring another file.
    let has_model = files.iter().any(|need| need.model);
    let kin = if has_model { answer_identity(command, &files, libraries) } else { None };
    NeedsCheck { stamps: stamps.collect(), missing, kin }
}

/// Returns `None` if a file of the identity cannot be found.
fn answer_identity(
    command: &ServerCommand,
    files: &[NeededFile],
    libraries: Vec<PathBuf>,
) -> Option<AnswerIdentity> {
    let ServerCommand { wrapper, binary, args, env, env_remove, directory, kind: _ } = command;
    let mut paths: BTreeSet<PathBuf> = files.iter().map(|need| need.path.clone()).collect();
    paths.extend(named_files(command));
    let mut rest = DefaultHasher::new();
    (wrapper, args, env, env_remove, directory).hash(&mut rest);
    hash_stamps(&paths, &mut rest);
    paths.extend(libraries);
    paths.insert(absolute_binary(command)?);
    for folder in library_directories(command) {
        paths.extend(libraries_in(&folder)?);
    }
    let mut whole = DefaultHasher::new();
    (wrapper, binary, args, env, env_remove, directory).hash(&mut whole);
    hash_stamps(&paths, &mut whole);
    Some(AnswerIdentity {
        made_of: whole.finish(),
        but_for_binary: rest.finish(),
        answer_tokens: hints::max_answer_tokens(command),
    })
}

fn hash_stamps(paths: &BTreeSet<PathBuf>, hasher: &mut DefaultHasher) {
    for path in paths {
        let stamp = file_stamp(path);
        stamp.map(|FileStamp { inode, bytes, modified, .. }| (inode, bytes, modified)).hash(hasher);
    }
}

/// Files that a command may name: each word, each part of a list (`a.gguf,b.gguf`), and each part without
/// its scale (`a.gguf:0.5`). This covers unknown flags. Log files are excluded, because they change all the
/// time.
fn named_files(command: &ServerCommand) -> BTreeSet<PathBuf> {
    let is_log = |name: &str| name.to_ascii_lowercase().contains("log");
    let mut values = Vec::new();
    let mut behind_log = false;
    for word in &command.args {
        let (flag, value) = match word.split_once('=') {
            Some((flag, value)) if flag.starts_with('-') => (Some(flag), value),
            _ => (None, word.as_str()),
        };
        if !behind_log && !flag.is_some_and(is_log) {
            values.push(value.to_owned());
        }
        behind_log = flag.is_none() && word.starts_with('-') && is_log(word);
    }
    let mut named = BTreeSet::new();
    for (name, value) in command.env.iter().filter(|(name, _)| !is_log(name)) {
        let path = command.resolve_path(value);
        if is_of_llama_cpp(name) {
            values.push(value.clone());
        } else if path.is_file() && is_model_or_library(&path) {
            named.insert(path);
        }
    }
    let inherited =
        std::env::vars_os().filter_map(|(name, value)| name.into_string().ok().zip(value.into_string().ok()));
    let inherited = inherited.filter(|(name, _)| is_of_llama_cpp(name) && !is_log(name));
    values.extend(inherited.map(|(_, value)| value));
    for value in &values {
        let parts =
            value.split(',').flat_map(|part| [Some(part), part.rsplit_once(':').map(|(path, _)| path)]);
        let parts = parts.flatten().chain([value.as_str()]).filter(|part| !part.is_empty());
        named.extend(parts.map(|part| command.resolve_path(part)).filter(|path| path.is_file()));
    }
    named
}

/// True for variables of llama.cpp. Other variables may name files that a process writes, such as a heap
/// profile; these change at each check.
fn is_of_llama_cpp(name: &str) -> bool {
    // `LLAMA_WARDEN` variables are our own configuration.
    ["LLAMA_", "GGML_"].iter().any(|of| name.starts_with(of)) && !name.starts_with("LLAMA_WARDEN")
}

fn is_model_or_library(path: &Path) -> bool {
    read_magic(path).is_ok_and(|magic| magic == *b"GGUF" || magic == *b"\x7fELF")
}

fn read_magic(path: &Path) -> io::Result<[u8; 4]> {
    let mut magic = [0; 4];
    File::open(path)?.read_exact(&mut magic)?;
    Ok(magic)
}

/// File limit of a folder that is searched for libraries. A build may open libraries that its binary does
/// not name.
const MAX_LIBRARY_FILES: usize = 4096;

/// Libraries in a folder; `None` for too many files. An unreadable folder counts as empty, because no process
/// can open its files.
fn libraries_in(folder: &Path) -> Option<Vec<PathBuf>> {
    let Ok(entries) = fs::read_dir(folder) else { return Some(Vec::new()) };
    let entries: Vec<fs::DirEntry> = entries.flatten().take(MAX_LIBRARY_FILES + 1).collect();
    let libraries = entries.iter().filter(|entry| entry.file_name().to_string_lossy().contains(".so"));
    (entries.len() <= MAX_LIBRARY_FILES).then(|| libraries.map(fs::DirEntry::path).collect())
}

fn file_stamp(path: &Path) -> Option<FileStamp> {
    let data = fs::metadata(path).ok()?;
    Some(FileStamp {
        inode: data.ino(),
        // The times of a directory show changes of its contents.
        bytes: if data.is_dir() { 0 } else { data.len() },
        changed: (data.ctime(), data.ctime_nsec()),
        modified: (data.mtime(), data.mtime_nsec()),
    })
}

struct NeededFile {
    path: PathBuf,
    /// True if the file has to begin with GGUF's magic bytes.
    model: bool,
}

fn needed_files(command: &ServerCommand) -> Vec<NeededFile> {
    if !command.kind.is_llama_server() {
        // The same flags name other things: `python -m vllm` names a module.
        return Vec::new();
    }
    let flags: Vec<String> = command.args.iter().map(|arg| normal_flag(arg)).collect();
    let downloads = flags.iter().any(|flag| DOWNLOAD_FLAGS.contains(&flag.as_str()));
    let mut needs = Vec::new();
    for (flag, value) in flags.iter().map(String::as_str).zip(command.args.iter().skip(1)) {
        let model = MODEL_FLAGS.contains(&flag);
        // `--lora` accepts lists, and in newer versions a scale after a colon: check plain values only.
        let is_list = matches!(flag, "--lora" | "--control-vector") && value.contains([',', ':']);
        let is_file = OTHER_FILE_FLAGS.contains(&flag) && !is_list;
        if is_file || (model && !downloads) {
            let parts = model_parts(value);
            needs.extend(parts.iter().map(|part| NeededFile { path: command.resolve_path(part), model }));
        }
    }
    if !downloads {
        let given = MODEL_VARIABLES.iter().filter_map(|name| command.own_variable(name));
        let given = given.filter(|value| !value.is_empty());
        needs.extend(given.map(|value| NeededFile { path: command.resolve_path(value), model: true }));
    }
    needs
}

/// All parts of a split model (`x-00001-of-00003.gguf`), or the only file.
fn model_parts(value: &str) -> Vec<String> {
    let split = || {
        let stem = value.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, first) = rest.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        let count = Some(count).filter(|count| digits(count) && digits(first))?;
        let last: u32 = count.parse().ok().filter(|last| *last <= 1000)?;
        Some((1..=last).map(|part| format!("{prefix}-{part:05}-of-{count}.gguf")).collect::<Vec<_>>())
    };
    split().unwrap_or_else(|| vec![value.to_owned()])
}

fn absolute_binary(command: &ServerCommand) -> Option<PathBuf> {
    command.binary.is_absolute().then(|| command.binary.clone())
}

/// Directories in which libraries are searched: a new file there may be the missing library.
fn library_directories(command: &ServerCommand) -> BTreeSet<PathBuf> {
    let of_binary = absolute_binary(command).and_then(|path| path.parent().map(Path::to_owned));
    let listed = command
        .own_variable("LD_LIBRARY_PATH")
        .unwrap_or_default()
        .split(':')
        .filter(|part| !part.is_empty())
        .map(PathBuf::from);
    of_binary.into_iter().chain(listed).collect()
}

fn missing_binary(command: &ServerCommand) -> Option<MissingNeed> {
    let path = absolute_binary(command)?;
    let wrong = match fs::metadata(&path) {
        Err(error) => format!("{error}: check the path of the binary, or build it again"),
        Ok(data) if data.is_dir() => "it is a directory: check the path of the binary".to_owned(),
        Ok(_) => {
            let error = rustix::fs::access(&path, Access::EXEC_OK).err()?;
            format!("{error}: make it executable (chmod +x) and its directories accessible")
        }
    };
    let message = format!("cannot run {}: {wrong}", path.display());
    Some(MissingNeed { kind: FailureKind::NotExecutable, message })
}

fn missing_file(need: &NeededFile) -> Option<MissingNeed> {
    let told = |why: String| {
        let message = format!("cannot use {}: {why}", need.path.display());
        Some(MissingNeed { kind: FailureKind::BadModel, message })
    };
    match fs::metadata(&need.path) {
        Err(error) => return told(format!("{error}: put the file back or correct its path")),
        Ok(data) if data.is_dir() && need.model => {
            return told("it is a directory: correct the path of the file".to_owned());
        }
        // Opening a pipe could block.
        Ok(data) if !data.is_file() => return None,
        Ok(_) => {}
    }
    match read_magic(&need.path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            told(format!("{error}: make it readable for this account"))
        }
        Err(error) if need.model && error.kind() == io::ErrorKind::UnexpectedEof => {
            told("it is no whole GGUF model: copy it again".to_owned())
        }
        Ok(magic) if need.model && magic != *b"GGUF" => told("it is no GGUF model: copy it again".to_owned()),
        _ => None,
    }
}

/// A library that the running process has mapped and that was deleted without a successor.
fn missing_library(running: u32) -> Option<MissingNeed> {
    let maps = fs::read_to_string(format!("/proc/{running}/maps")).ok()?;
    let gone: BTreeSet<&str> = maps.lines().filter_map(deleted_library).collect();
    let path = gone.into_iter().map(Path::new).find(|path| !has_successor(path))?;
    let message = format!(
        "the shared library {}, which the running process uses, is gone: put it back, or build the binary again",
        path.display()
    );
    Some(MissingNeed { kind: FailureKind::MissingLibrary, message })
}

/// Deleted library in a line of `/proc/PID/maps`: `address perms offset dev inode path (deleted)`.
fn deleted_library(line: &str) -> Option<&str> {
    let path = line.strip_suffix(" (deleted)")?;
    let path = &path[path.find('/')?..];
    let name = path.rsplit('/').next()?;
    (Path::new(name).extension().is_some_and(|end| end == "so") || name.contains(".so.")).then_some(path)
}

/// True if the directory has this library in any version, as after an upgrade.
fn has_successor(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(stem) = name.find(".so").map(|at| &name[..at + ".so".len()]) else { return true };
    let Some(entries) = path.parent().and_then(|directory| fs::read_dir(directory).ok()) else {
        return path.exists();
    };
    entries
        .filter_map(Result::ok)
        .any(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(stem)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{ReadyCheck, ServerKind};

    fn command(directory: &Path, args: &[&str]) -> ServerCommand {
        use std::os::unix::fs::PermissionsExt as _;
        let binary = directory.join("llama-server");
        fs::write(&binary, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        ServerCommand { args, directory: Some(directory.to_owned()), ..ServerCommand::from_binary(binary) }
    }

    fn missing(command: &ServerCommand) -> Option<(FailureKind, String)> {
        check_needs(command, None).missing.map(|missing| (missing.kind, missing.message))
    }

    #[test]
    fn each_file_that_a_start_needs_is_missed_by_name() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        fs::write(at("m-00001-of-00002.gguf"), "GGUF").unwrap();
        let whole =
            command(home.path(), &["--model", "m-00001-of-00002.gguf", "--mmproj", "p.gguf", "-c", "none"]);
        let mut told = String::new();
        let mut tell = || {
            let (kind, message) = missing(&whole).unwrap();
            told.extend([message.replace(home.path().to_str().unwrap(), "DIR").as_str(), "\n"]);
            kind
        };
        tell();
        fs::write(at("m-00002-of-00002.gguf"), "GGUF").unwrap();
        tell();
        fs::write(at("p.gguf"), "<html>").unwrap();
        tell();
        fs::write(at("p.gguf"), "GG").unwrap();
        tell();
        fs::remove_file(at("p.gguf")).unwrap();
        fs::create_dir(at("p.gguf")).unwrap();
        tell();
        fs::remove_dir(at("p.gguf")).unwrap();
        fs::write(at("p.gguf"), "GGUF").unwrap();
        assert_eq!(missing(&whole), None);
        fs::remove_file(&whole.binary).unwrap();
        assert_eq!(tell(), FailureKind::NotExecutable);
        insta::assert_snapshot!(told);
    }

    #[test]
    fn whatever_an_answer_depends_on_makes_another_kin_when_it_changes() {
        let home = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(home.path().join(name), text).unwrap();
        for name in [
            "m.gguf",
            "a.gguf",
            "b.gguf",
            "t.jinja",
            "of_env",
            "of_fork",
            "libggml-cuda.so",
            "server.log",
            "notes",
        ] {
            write(name, "GGUF");
        }
        let mut command = command(
            home.path(),
            &[
                "-m",
                "m.gguf",
                "--lora-scaled",
                "a.gguf:0.5,b.gguf:1",
                "--some-new-flag=t.jinja",
                "--log-file",
                "server.log",
            ],
        );
        // The last file does not exist before the process writes it.
        command.env = [("LLAMA_ARG_NEW", "of_env"), ("FORK_ADAPTER", "of_fork"), ("MALLOC_TRACE", "written")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        let kin = |command: &ServerCommand| check_needs(command, None).kin.unwrap();
        let first = kin(&command);
        for name in ["server.log", "notes", "written", "written"] {
            write(name, &format!("and more {:?}", fs::read_to_string(home.path().join(name)).ok()));
            assert_eq!(kin(&command), first, "{name} changes no answer");
        }
        let mut before = first;
        for name in
            ["llama-server", "m.gguf", "a.gguf", "b.gguf", "t.jinja", "of_env", "of_fork", "libggml-cuda.so"]
        {
            write(name, "GGUF and more");
            let after = kin(&command);
            assert_ne!(after, before, "{name}");
            before = after;
        }
        write("libggml-hip.so", "new");
        assert_ne!(kin(&command), before);
        command.args.push("-fa".to_owned());
        assert_ne!(kin(&command), before);
        // A download may be another file the next time, and a name without a path another program.
        command.args.extend(["-hf".to_owned(), "a/b".to_owned()]);
        assert_eq!(check_needs(&command, None).kin, None);
        command.args.truncate(2);
        assert!(check_needs(&command, None).kin.is_some());
        command.binary = "llama-server".into();
        assert_eq!(check_needs(&command, None).kin, None);
    }

    #[test]
    fn a_library_that_only_the_next_binary_names_is_missed_before_it_is_started() {
        let home = tempfile::tempdir().unwrap();
        let command = command(home.path(), &[]);
        let loader = home.path().join("ld-linux-x86-64.so.2");
        fs::write(&loader, "").unwrap();
        let program = libraries::tests::made(loader.to_str().unwrap(), &["libnowhere-at-all.so.7"], "");
        fs::write(&command.binary, program).unwrap();
        let (kind, told) = missing(&command).unwrap();
        assert_eq!(kind, FailureKind::MissingLibrary);
        insta::assert_snapshot!(told.replace(home.path().to_str().unwrap(), "DIR"));
        let found = home.path().join("libnowhere-at-all.so.7");
        fs::write(&found, "").unwrap();
        let place = home.path().to_str().unwrap().to_owned();
        let listed = ServerCommand { env: vec![("LD_LIBRARY_PATH".to_owned(), place)], ..command };
        assert_eq!(missing(&listed), None);
    }

    #[test]
    fn what_is_downloaded_or_not_understood_is_not_missed() {
        let home = tempfile::tempdir().unwrap();
        for args in
            [&["-hf", "org/model", "-m", "cache.gguf"][..], &["--lora", "a.gguf:0.5,b.gguf"], &["-c", "512"]]
        {
            assert_eq!(missing(&command(home.path(), args)), None, "{args:?}");
        }
    }

    #[test]
    fn another_program_needs_its_binary_and_no_file_that_a_flag_names() {
        let home = tempfile::tempdir().unwrap();
        let kind = ServerKind::OtherProgram(ReadyCheck { path: "/".to_owned(), needs_success: true });
        let command = ServerCommand { kind, ..command(home.path(), &["-m", "vllm"]) };
        let needs = check_needs(&command, None);
        assert_eq!((needs.missing, needs.kin), (None, None));
        fs::remove_file(&command.binary).unwrap();
        assert_eq!(missing(&command).unwrap().0, FailureKind::NotExecutable);
    }

    #[test]
    fn a_change_of_a_file_or_beside_the_binary_shows() {
        let home = tempfile::tempdir().unwrap();
        let command = command(home.path(), &["-m", "m.gguf"]);
        let before = check_needs(&command, None);
        assert_eq!(before, check_needs(&command, None), "nothing changed");
        fs::write(home.path().join("m.gguf"), "GGUF").unwrap();
        let with_model = check_needs(&command, None);
        assert!(with_model.stamps != before.stamps && with_model.missing.is_none());
        fs::write(home.path().join("libggml.so"), "").unwrap();
        assert_ne!(check_needs(&command, None).stamps, with_model.stamps);
    }

    #[test]
    fn a_library_that_was_upgraded_is_not_missed_and_one_that_is_gone_is() {
        let home = tempfile::tempdir().unwrap();
        let old = home.path().join("libggml.so.1.2");
        let line = format!("7f00-7f01 r-xp 00000000 08:01 77 {} (deleted)", old.display());
        assert_eq!(deleted_library(&line).map(PathBuf::from), Some(old.clone()));
        assert_eq!(deleted_library("7f00-7f01 rw-p 00000000 00:01 9 /memfd:x (deleted)"), None);
        assert!(!has_successor(&old));
        fs::write(home.path().join("libggml.so.1.3"), "").unwrap();
        assert!(has_successor(&old));
    }
}
