//! Promises about the source code: the dependencies of crates, and the beginning of every file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use cargo_metadata::{CargoOpt, DependencyKind, Metadata, MetadataCommand};
use regex::Regex;
use warden_rig::{Context as _, Outcome, Trouble};

/// For each crate, our crates that it may depend on.
const MAY_DEPEND_ON: [(&str, &[&str]); 15] = [
    ("warden-policies", &[]),
    ("warden-patches", &[]),
    ("warden-builder", &["warden-patches"]),
    ("warden-tracer", &[]),
    ("warden-tracer-reader", &[]),
    ("warden-sensors", &["warden-policies"]),
    ("warden-supervisor", &["warden-policies", "warden-sensors"]),
    ("warden-experiment", &["warden-policies"]),
    ("warden-diagnose", &["warden-experiment", "warden-policies", "warden-sensors", "warden-supervisor"]),
    ("warden-gateway", &["warden-policies", "warden-sensors", "warden-supervisor"]),
    (
        "warden-config",
        &[
            "warden-policies",
            "warden-sensors",
            "warden-supervisor",
            "warden-gateway",
            "warden-patches",
            "warden-builder",
        ],
    ),
    (
        "warden-admin",
        &[
            "warden-config",
            "warden-policies",
            "warden-sensors",
            "warden-supervisor",
            "warden-gateway",
            "warden-patches",
        ],
    ),
    (
        "warden-page",
        &[
            "warden-admin",
            "warden-policies",
            "warden-supervisor",
            "warden-gateway",
            "warden-patches",
            "warden-builder",
        ],
    ),
    (
        "llama-warden",
        &[
            "warden-page",
            "warden-admin",
            "warden-config",
            "warden-policies",
            "warden-sensors",
            "warden-supervisor",
            "warden-gateway",
            "warden-experiment",
            "warden-diagnose",
            "warden-patches",
            "warden-builder",
            "warden-tracer-reader",
        ],
    ),
    (
        "warden-tests",
        &[
            "warden-policies",
            "warden-experiment",
            "warden-sensors",
            "warden-patches",
            "warden-builder",
            "warden-tracer-reader",
        ],
    ),
];

/// Crates without clock, I/O and async, with their sources.
const PURE_CRATES: [(&str, &str); 2] =
    [("warden-policies", "policies/src"), ("warden-experiment", "lab/experiment/src")];

/// Foreign crates that these crates may use. `foldhash` hashes, `toml` parses a compiled-in text.
const PURE_CRATES_MAY_USE: [&str; 5] = ["foldhash", "serde", "serde_json", "thiserror", "toml"];

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned).unwrap_or_default()
}

pub(crate) fn metadata() -> Result<Metadata, Trouble> {
    let mut command = MetadataCommand::new();
    command.manifest_path(root().join("Cargo.toml")).features(CargoOpt::AllFeatures).no_deps();
    Ok(command.exec()?)
}

/// Dependencies of each package of the workspace, of these kinds.
fn dependencies(kinds: &[DependencyKind]) -> Result<BTreeMap<String, BTreeSet<String>>, Trouble> {
    let of = |package: &cargo_metadata::Package| {
        let all = package.dependencies.iter().filter(|dependency| kinds.contains(&dependency.kind));
        (package.name.to_string(), all.map(|dependency| dependency.name.clone()).collect())
    };
    Ok(metadata()?.workspace_packages().into_iter().map(of).collect())
}

#[test]
fn crates_depend_on_each_other_in_one_direction_only() -> Outcome {
    let all = [DependencyKind::Normal, DependencyKind::Development, DependencyKind::Build];
    let found = dependencies(&all)?;
    let allowed: BTreeMap<&str, &[&str]> = MAY_DEPEND_ON.into_iter().collect();
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    let known: Vec<&str> = allowed.keys().copied().collect();
    assert_eq!(names, known, "a new crate needs its line in MAY_DEPEND_ON");
    for (package, uses) in &found {
        let ours: Vec<&str> =
            uses.iter().map(String::as_str).filter(|name| allowed.contains_key(name)).collect();
        for used in ours {
            assert!(allowed[package.as_str()].contains(&used), "{package} must not depend on {used}");
        }
    }
    Ok(())
}

/// Modules in the `src` of a crate from top to bottom: folders, and files next to `lib.rs`. Each uses only
/// modules further down, so there is no cycle.
const ROOMS: [(&str, &[&str]); 4] = [
    (
        "proxy/gateway/src",
        &[
            "gateway", "client", "exchange", "shared", "answer", "page", "access", "rules", "backend",
            "body", "route", "refusal", "requests", "protocol", "config", "observe", "trace", "workers",
            "clock",
        ],
    ),
    (
        "proxy/supervisor/src",
        &[
            "fleet",
            "remote",
            "model",
            "start_search",
            "solo",
            "memory",
            "lease",
            "process",
            "view",
            "spec",
            "origin",
            "state",
            "worker_threads",
            "error",
            "clock",
            "sync",
        ],
    ),
    (
        "proxy/admin/src",
        &[
            "server",
            "client",
            "instance",
            "pointer",
            "answer",
            "route",
            "series_route",
            "requests",
            "canary",
            "probe",
            "otel",
            "state",
            "status",
            "upgrade_order",
            "leaving",
            "series",
            "growth_text",
            "query",
            "response",
            "metrics",
            "pool_facts",
            "memory_use",
            "access_log",
            "access_line",
            "log_writer",
            "error",
            "clock",
        ],
    ),
    (
        "proxy/page/src",
        &[
            "door",
            "serve",
            "act",
            "live",
            "state",
            "requests",
            "overview",
            "frame",
            "events",
            "builds",
            "configuration",
            "answer",
            "memory",
            "drawn",
            "part",
            "build_text",
            "hub",
            "view",
            "guard",
            "files",
            "token",
            "pace",
            "markup",
        ],
    ),
];

/// Endings of the names of files and folders that contain only tests.
const OF_TESTS: [&str; 2] = ["tests", "lib"];

#[test]
fn the_rooms_of_a_crate_use_only_those_below_them() -> Outcome {
    for (source, rooms) in ROOMS {
        let source = root().join(source);
        let place = |room: &str| rooms.iter().position(|known| *known == room);
        let (mut seen, mut wrong) = (BTreeSet::new(), Vec::new());
        for file in rust_files(&source)? {
            let path = file.strip_prefix(&source)?.with_extension("");
            let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
            if parts.iter().any(|part| OF_TESTS.iter().any(|end| part.ends_with(end))) {
                continue;
            }
            let room = *parts.first().context(file.display())?;
            let here = place(room).context(format!("{} has no place in ROOMS", file.display()))?;
            seen.insert(room.to_owned());
            let depth = parts.len() - usize::from(parts.last() == Some(&"mod"));
            for used in rooms_used(&std::fs::read_to_string(&file)?, depth) {
                if place(&used).is_none_or(|there| there < here) {
                    wrong.push(format!("{} uses {used}", file.display()));
                }
            }
        }
        assert!(wrong.is_empty(), "these use what lies above them:\n{}", wrong.join("\n"));
        let rooms: BTreeSet<String> = rooms.iter().map(|room| (*room).to_owned()).collect();
        assert_eq!(seen, rooms, "ROOMS names what is not there");
    }
    Ok(())
}

/// Modules that a file uses: names after `crate::`, and after `super::` if that leads out of the file's own
/// module, which is `depth` levels below `crate`. Tests inside the file may use everything.
fn rooms_used(text: &str, depth: usize) -> BTreeSet<String> {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code: Vec<&str> = code.collect();
    let tests = code.windows(2).position(|two| {
        two[0] == "#[cfg(test)]" && two[1].contains("mod ") && two[1].trim_end().ends_with('{')
    });
    let code = code[..tests.unwrap_or(code.len())].join("\n");
    let mut used = BTreeSet::new();
    for start in ["crate::".to_owned(), "super::".repeat(depth)] {
        for (at, _) in code.match_indices(&start) {
            let inside = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            let rest = &code[at + start.len()..];
            if inside || rest.starts_with("super::") {
                continue;
            }
            let list =
                rest.strip_prefix('{').and_then(|list| list.split('}').next()).map(|list| list.split(','));
            let names: Vec<&str> = list.map_or_else(|| vec![rest], Iterator::collect);
            let name = |text: &str| {
                text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>()
            };
            used.extend(names.into_iter().map(name).filter(|name| !name.is_empty()));
        }
    }
    used
}

#[test]
fn pure_crates_use_nothing_that_could_do_io() -> Outcome {
    let found = dependencies(&[DependencyKind::Normal, DependencyKind::Build])?;
    for (pure, _) in PURE_CRATES {
        let uses = found.get(pure).context(pure)?;
        for used in uses.iter().filter(|used| *used != "warden-policies") {
            assert!(PURE_CRATES_MAY_USE.contains(&used.as_str()), "{pure} must not depend on {used}");
        }
    }
    Ok(())
}

#[test]
fn pure_crates_name_no_clock_no_file_and_no_future() -> Outcome {
    let banned = [
        "std::fs",
        "std::net",
        "std::process",
        "std::thread",
        "Instant::now",
        "SystemTime",
        "Timestamp::now",
        "Zoned::now",
        "async fn",
        "tokio",
    ];
    for (_, source) in PURE_CRATES {
        for file in rust_files(&root().join(source))? {
            let text = std::fs::read_to_string(&file)?;
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            for (number, line) in code.enumerate() {
                for word in banned {
                    assert!(!line.contains(word), "{}: about line {}: {word}", file.display(), number + 1);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_file_opens_with_what_it_is_for() -> Outcome {
    for folder in ["policies", "patches", "builder", "proxy", "lab", "tests"] {
        for file in rust_files(&root().join(folder))? {
            let text = std::fs::read_to_string(&file)?;
            assert!(text.starts_with("//!"), "{} does not open with //!", file.display());
        }
    }
    Ok(())
}

/// The manifests turn doctests off, because each crate's run takes two seconds even if it has none.
#[test]
fn no_doc_comment_has_an_example_that_nobody_would_run() -> Outcome {
    for folder in ["policies", "patches", "builder", "proxy", "lab", "tests"] {
        for file in rust_files(&root().join(folder))? {
            let text = std::fs::read_to_string(&file)?;
            let fences = text.lines().filter_map(|line| {
                let line = line.trim_start();
                let line = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
                line.trim_start().strip_prefix("```")
            });
            for language in fences.step_by(2) {
                let is_code = matches!(language, "" | "rust" | "no_run" | "should_panic" | "compile_fail");
                assert!(!is_code, "{}: write a test instead of the example", file.display());
            }
        }
    }
    Ok(())
}

#[test]
fn no_test_module_is_forgotten() -> Outcome {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("it");
    let main = std::fs::read_to_string(here.join("main.rs"))?;
    for entry in std::fs::read_dir(&here)? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|stem| stem.to_str()).context(path.display())?;
        let is_module = path.is_file() || !rust_files(&path)?.is_empty();
        if name != "main" && is_module {
            assert!(
                main.lines().any(|line| line.trim() == format!("mod {name};")),
                "main.rs lacks `mod {name};`"
            );
        }
    }
    Ok(())
}

/// Only an optional job builds these fuzz targets, from source files that no library exports. Check
/// that their needs are met, because a failure might be noticed weeks later.
#[test]
fn the_fuzz_targets_made_of_the_program_have_what_it_has() -> Outcome {
    for target in ["import", "query"] {
        has_what_it_takes_in(target).context(target)?;
    }
    Ok(())
}

fn has_what_it_takes_in(target: &str) -> Outcome {
    let fuzz = root().join("tests/fuzz");
    let taken_in = std::fs::read_to_string(fuzz.join(format!("fuzz_targets/{target}.rs")))?;
    let proxy = root().join("proxy");
    let mut files = Vec::new();
    let mut modules = BTreeSet::new();
    for line in taken_in.lines().filter_map(|line| line.strip_prefix("#[path = \"../../../proxy/")) {
        let path = line.split('"').next().context(line)?;
        let module = path.trim_end_matches("/mod.rs").trim_end_matches(".rs");
        modules.insert(module.rsplit('/').next().unwrap_or(module).to_owned());
        match path.strip_suffix("/mod.rs") {
            Some(folder) => files.extend(rust_files(&proxy.join(folder))?),
            None => files.push(proxy.join(path)),
        }
    }
    assert!(modules.contains(target), "{modules:?}");

    let mut command = MetadataCommand::new();
    command.manifest_path(fuzz.join("Cargo.toml")).features(CargoOpt::AllFeatures).no_deps();
    let needs = |metadata: &Metadata, package: &str| -> Result<BTreeMap<String, String>, Trouble> {
        let package = metadata.packages.iter().find(|one| *one.name == package).context(package)?;
        let normal = package.dependencies.iter().filter(|one| one.kind == DependencyKind::Normal);
        Ok(normal.map(|one| (one.name.clone(), one.req.to_string())).collect())
    };
    let there = needs(&command.exec()?, "warden-fuzz")?;
    let ours = metadata()?;
    let mut program = needs(&ours, "llama-warden")?;
    program.extend(needs(&ours, "warden-admin")?);
    for (name, version) in &program {
        if let Some(other) = there.get(name) {
            assert_eq!(
                version, other,
                "{name} in tests/fuzz/Cargo.toml is another version than the program's"
            );
        }
    }
    for file in files {
        let text = std::fs::read_to_string(&file)?;
        for module in text.split("crate::").skip(1) {
            let module: String = module.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let known = modules.contains(&module) || module.is_empty();
            assert!(known, "{}: crate::{module} is not in fuzz_targets/{target}.rs", file.display());
        }
        for name in program.keys().filter(|name| !there.contains_key(*name)) {
            let used = text.contains(&format!("{}::", name.replace('-', "_")));
            assert!(!used, "{}: {name} is not in tests/fuzz/Cargo.toml", file.display());
        }
    }
    Ok(())
}

pub(crate) fn rust_files(folder: &Path) -> Result<Vec<PathBuf>, Trouble> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).context(next.display())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[test]
fn the_readmes_tests_run_as_many_at_a_time_as_those_of_ci() -> Outcome {
    const COMMAND: &str = "cargo test --workspace --no-fail-fast";
    let read = |name: &str| std::fs::read_to_string(root().join(name)).context(name);
    let (readme, ci) = (read("README.md")?, read(".ci/run")?);
    assert!(readme.contains(&format!("\n$ {COMMAND}\n")), "README.md names the command");
    assert!(ci.contains(&format!("{COMMAND} --locked")), ".ci/run runs the same command");
    let settings: toml::Table = read(".cargo/config.toml")?.parse()?;
    let threads = settings["env"]["RUST_TEST_THREADS"].as_str().context("a number of threads")?;
    let formula = Regex::new(r"RUST_TEST_THREADS:-\$\(\((\d+) \* \$\(nproc\)\)\)")?;
    let per_core: u32 = formula.captures(&ci).context("threads for each core")?[1].parse()?;
    // Most tests wait for processes: with a thread for each core, the command took three times as long.
    assert_eq!(threads.parse::<u32>()?, per_core * 2, "as many as .ci/run on two cores");
    Ok(())
}
