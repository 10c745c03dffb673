//! Promise: `build` puts a verified llama-server into the store, complete or not at all, and reuses it in a
//! second build. Builds can be listed, shown and removed. `quickstart` does all this in one command.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use warden_builder::{
    AmxKernels, BuildEnvironment, BuildRequest, BuildSource, Builder, BuilderDirs, ComputeBackend, CpuTarget,
    EventReporter, MachineNeeds, RunPriority, verify,
};
use warden_rig::process::{Kid, ProcessId};
use warden_rig::real::{NO_PAGE, SERVER_VARIABLE, llama_server};
use warden_rig::real_weights;
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Home, Outcome, Trouble, binaries, wait_until};

/// Limit for a build with a warm compiler cache, a start and a replacement on a busy machine.
const LONG: Duration = Duration::from_secs(600);

/// Options of the rig's build, because other options would give another build.
const BUILD: [&str; 8] = ["build", "--sdist", "--backend", "cpu", "--arch", "portable", "-D", NO_PAGE];

/// A home with the store and cache of the tests' llama-server, which is built first.
async fn home_with_store() -> Result<Option<Home>, Trouble> {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        // The given server comes from outside the store.
        return Ok(None);
    }
    llama_server().await?;
    let mut home = Home::new()?;
    for (name, folder) in [("DATA", "data"), ("CACHE", "cache")] {
        let name = format!("LLAMA_WARDEN_PATHS__{name}_DIR");
        home.env.insert(name.into(), binaries::store()?.join(folder).into());
    }
    for name in ["PIP_CERT", "PIP_FIND_LINKS", "CCACHE_DIR", "SSL_CERT_FILE", "CARGO_HOME"] {
        if let Some(value) = std::env::var_os(name) {
            home.env.insert(name.into(), value);
        }
    }
    Ok(Some(home))
}

fn names(folder: &Path) -> BTreeSet<OsString> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect()
}

/// Processes whose command line contains the folder.
fn working_in(folder: &Path) -> Vec<ProcessId> {
    let Ok(all) = procfs::process::all_processes() else { return Vec::new() };
    let found = all.flatten().filter_map(|process| ProcessId::of(process.pid));
    let mentions = |process: &ProcessId| {
        process.command_line().iter().any(|word| word.contains(&*folder.to_string_lossy()))
    };
    found.filter(mentions).collect()
}

#[tokio::test]
async fn a_second_build_of_the_same_plan_is_a_hit() -> Outcome {
    let Some(home) = home_with_store().await? else { return Ok(()) };
    let ran = home.warden([&BUILD[..], &["--json"]].concat(), LONG).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let built: Value = serde_json::from_str(&ran.stdout)?;
    assert_eq!(built["hit"], true, "{built}");
    assert_eq!(built["binary"].as_str(), llama_server().await?.to_str());
    let ran = home.warden([&BUILD[..], &["--plan", "--json"]].concat(), LONG).await?;
    let plan: Value = serde_json::from_str(&ran.stdout)?;
    let id = plan["id"].as_str().context("a plan has an id")?.to_owned();

    let ran = home.warden(["builds", "list", "--json"], SOON).await?;
    assert!(ran.stdout.contains(&id), "{ran:?}");
    let ran = home.warden(["builds", "show", &id[..6]], SOON).await?;
    assert!(ran.code == 0 && ran.stdout.contains("0c1e57098"), "the commit is shown: {ran:?}");
    Ok(())
}

#[tokio::test]
async fn builds_are_removed_by_id_and_by_gc_and_others_stay() -> Outcome {
    let Some(mut home) = home_with_store().await? else { return Ok(()) };
    let original = llama_server().await?;
    let build = original.parent().context("a build has a folder")?;
    let store = home.path().join("own-store");
    let copy = store.join("builds").join(build.file_name().context("a build has a name")?);
    std::fs::create_dir_all(&copy)?;
    for name in names(build) {
        std::fs::copy(build.join(&name), copy.join(&name))?;
    }
    home.env.insert("LLAMA_WARDEN_PATHS__DATA_DIR".into(), store.into());
    let id = copy.file_name().and_then(|name| name.to_str()).context("an id is text")?;

    let ran = home.warden(["builds", "rm", "0000000000"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("0000000000"), "{ran:?}");
    let ran = home.warden(["builds", "gc", "--keep", "1"], SOON).await?;
    assert!(ran.code == 0 && copy.exists(), "the newest stays: {ran:?}");
    let ran = home.warden(["builds", "rm", &id[..8]], SOON).await?;
    assert!(ran.code == 0 && !copy.exists(), "{ran:?}");
    assert!(original.exists(), "another store is not touched");
    Ok(())
}

#[tokio::test]
async fn ctrl_c_stops_the_compilers_and_leaves_nothing_half_made() -> Outcome {
    let Some(home) = home_with_store().await? else { return Ok(()) };
    let (data, cache) = (binaries::store()?.join("data"), binaries::store()?.join("cache"));
    let before = names(&data.join("builds"));
    // An option that no other build has, so that there is something to compile.
    let option = format!("WARDEN_TEST_MARK={}", std::process::id());
    let args: Vec<OsString> =
        [&BUILD[..], &["-D", &option]].concat().into_iter().map(OsString::from).collect();
    let log = home.path().join("build.log");
    let mut kid = Kid::start(&binaries::llama_warden()?, &args, &home.env, home.path(), log)?;
    kid.says("compiling 1", LONG).await?;
    let id = id_in(&kid.output()).context(kid.output())?;
    let work = || {
        names(&cache.join("work"))
            .into_iter()
            .filter(|name| name.to_string_lossy().contains(&id))
            .collect::<Vec<_>>()
    };
    assert!(!work().is_empty(), "the build has a work folder with its id: {:?}", names(&cache));
    kid.signal(Signal::INT);
    let code = kid.exit(LONG).await?;
    assert_eq!(code, 130, "{}", kid.output());
    assert_eq!(work(), Vec::<OsString>::new(), "the work folder is gone");
    assert!(!names(&data.join("builds")).contains(&OsString::from(&id)), "not in the store");
    assert!(before.is_subset(&names(&data.join("builds"))), "other builds stay");
    wait_until("no compiler is left", SOON, async || working_in(&PathBuf::from(&id)).is_empty()).await
}

/// Writes a folder that resembles llama.cpp, but that no patch set knows.
fn write_source(folder: &Path) -> Outcome {
    for name in ["CMakeLists.txt", "ggml/CMakeLists.txt", "tools/server/CMakeLists.txt"] {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().context("a file has a folder")?)?;
        std::fs::write(path, "")?;
    }
    Ok(())
}

fn strange_source(home: &Home) -> Result<PathBuf, Trouble> {
    let folder = home.path().join("strange");
    write_source(&folder)?;
    Ok(folder)
}

/// Writes scripts that replace cmake, ninja and compilers. `compiler` extends the script of the C++ compiler;
/// `server` prints the script that ninja makes in place of llama-server.
fn write_toolchain(bin: &Path, compiler: &str, server: &str) -> Outcome {
    let scripts = [
        ("cc", "echo cc 12".to_owned()),
        (
            "c++",
            format!(
                "case \"$*\" in {compiler} *-dumpmachine*) echo x86_64-linux-gnu;; *) echo c++ 12;; esac"
            ),
        ),
        (
            "cmake",
            "[ \"$1\" = --version ] && echo cmake version 3.25.1 && exit\necho \"$@\" > flags".to_owned(),
        ),
        (
            "ninja",
            format!(
                "[ \"$1\" = --version ] && echo 1.11 && exit\nmkdir -p bin\n{{ {server}; }} > bin/llama-server\n\
                 chmod +x bin/llama-server"
            ),
        ),
    ];
    std::fs::create_dir_all(bin)?;
    for (name, script) in scripts {
        std::fs::write(bin.join(name), format!("#!/bin/sh\n{script}\n"))?;
        std::fs::set_permissions(bin.join(name), std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

#[tokio::test]
async fn a_fork_or_a_build_after_a_choice_is_run_only_if_it_is_chosen() -> Outcome {
    let mut home = Home::new()?;
    let (tools, fake) = (home.path().join("tools"), binaries::fake_llama()?);
    write_toolchain(&tools, "", &format!("echo '#!/bin/sh'; echo 'exec {} \"$@\"'", fake.display()))?;
    home.env.insert("PATH".into(), format!("{}:/usr/bin:/bin", tools.display()).into());
    let build = async |source: &str, more: &[&str]| {
        let folder = home.path().join(source);
        write_source(&folder)?;
        // Sources with equal files give the same build.
        std::fs::write(folder.join("CMakeLists.txt"), source)?;
        let args = ["build", "--source", source, "--backend", "cpu", "--plain"];
        home.warden(args.iter().chain(more), LONG).await
    };
    // Returns the id of the build and the last line, which names the build that models run.
    let id_and_end = async |source: &str, more: &[&str]| {
        let ran = build(source, more).await?;
        let last = ran.stdout.lines().last().context(ran.all())?.to_owned();
        Ok::<_, Trouble>((id_in(&ran.stdout).context(ran.all())?, last))
    };
    let in_use = |id: &str| format!("in use: models that name no build run {id} from their next start on");
    let (upstream, last) = id_and_end("llama.cpp", &[]).await?;
    assert_eq!(last, in_use(&upstream), "the newest build is run until one is chosen");
    let (fork, last) = id_and_end("fork-1.0", &[]).await?;
    let why = "it is made of fork, and the one in use of llama.cpp";
    let chooses = |id: &str| format!("`llama-warden builds use {id}` takes this one");
    let other = |id: &str, in_use: &str, why: &str| {
        format!("not in use: models that name no build run {in_use}; {why}. {}", chooses(id))
    };
    assert_eq!(last, other(&fork, &upstream, why));
    // The build is in the store; `--use` chooses it without another compilation.
    let ran = build("fork-1.0", &["--use"]).await?;
    assert!(ran.stdout.starts_with(&format!("build {fork} (already in the store)\n")), "{ran:?}");
    assert_eq!(ran.stdout.lines().last(), Some(&*in_use(&fork)), "{ran:?}");
    let (newer, last) = id_and_end("fork-2.0", &[]).await?;
    assert_eq!(last, other(&newer, &fork, "that one was chosen"), "a newer build waits for a choice");
    let ran = home.warden(["builds", "list"], SOON).await?;
    let state = |id: &str| ran.stdout.lines().find(|line| line.contains(id)).unwrap_or_default().to_owned();
    assert!(state(&fork).contains("in use") && !state(&fork).contains("was in use"), "{ran:?}");
    assert!(state(&upstream).contains("was in use"), "a rollback returns to it: {ran:?}");
    assert!(!state(&newer).contains("in use"), "{ran:?}");
    let ran = build("fork-2.0", &["--use", "--plan"]).await?;
    assert_eq!(ran.code, 2, "a plan makes nothing that could be used: {ran:?}");
    Ok(())
}

#[tokio::test]
async fn a_source_that_the_patches_do_not_know_is_exit_code_3_with_the_reasons_and_plain_is_not() -> Outcome {
    let home = Home::new()?;
    let source = strange_source(&home)?;
    let source = source.to_str().context("a path is text")?;
    let ran = home.warden(["build", "--source", source, "--backend", "cpu"], SOON).await?;
    assert_eq!(ran.code, 3, "{ran:?}");
    assert!(ran.stderr.contains("the patch set `server` is refused for this source:\n  "), "{ran:?}");
    assert!(ran.stderr.contains("hint: build without it (--plain"), "{ran:?}");
    let plain = ["build", "--source", source, "--backend", "cpu", "--plain", "--plan"];
    let ran = home.warden(plain, SOON).await?;
    assert!(ran.code == 0 && ran.stdout.contains("\npatches   none\n"), "{ran:?}");
    let ran = home.warden(["build", "--source", source, "--patch-set", "nonsense"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("`nonsense`"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn a_backend_whose_toolkit_is_not_there_is_told_before_anything_is_done() -> Outcome {
    let mut home = Home::new()?;
    let source = strange_source(&home)?;
    let source = source.to_str().context("a path is text")?;
    home.env.insert("CUDACXX".into(), "/nonexistent/nvcc".into());
    let ran = home.warden(["build", "--source", source, "--backend", "cuda", "--arch", "90"], SOON).await?;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(
        ran.stderr.contains("nvcc is not at `/nonexistent/nvcc`") && ran.stderr.contains("hint: "),
        "{ran:?}"
    );
    let ran =
        home.warden(["build", "--source", source, "--backend", "cuda", "--arch", "gfx1201"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("`gfx1201`"), "{ran:?}");
    Ok(())
}

/// Writes a llama-server that runs a script before fake-llama.
fn around_fake(folder: &Path, script: &str) -> Result<PathBuf, Trouble> {
    let path = folder.join("llama-server");
    let fake = binaries::fake_llama()?;
    std::fs::write(&path, format!("#!/bin/sh\n{script}\nexec '{}' \"$@\"\n", fake.display()))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

async fn checked(server: &Path, timeout: Duration) -> Result<Vec<String>, Trouble> {
    let done = verify(server, timeout, &EventReporter::silent(), &CancellationToken::new()).await?;
    Ok(done.checks.into_iter().map(|check| check.name).collect())
}

#[tokio::test]
async fn a_server_that_does_not_start_with_mean_pooling_is_verified_with_another() -> Outcome {
    let folder = tempfile::tempdir()?;
    let usual = around_fake(folder.path(), "")?;
    let checks = checked(&usual, SOON).await?;
    assert_eq!(checks, ["health", "completion", "chat", "health", "embedding"]);
    // Builds of about b4881 abort like this.
    let old = "case \" $* \" in *' --pooling mean '*) kill -ABRT $$; esac";
    let checks = checked(&around_fake(folder.path(), old)?, SOON).await?;
    assert_eq!(checks, ["health", "completion", "chat", "health", "embedding-last"]);
    // An assertion that calls a debugger hangs like this.
    let stuck = old.replace("kill -ABRT $$", "exec sleep 600");
    let checks = checked(&around_fake(folder.path(), &stuck)?, Duration::from_secs(10)).await?;
    assert_eq!(checks.last().map(String::as_str), Some("embedding-last"));
    let none = "case \" $* \" in *' --pooling '*) echo no pooling >&2; kill -ABRT $$; esac";
    let trouble = checked(&around_fake(folder.path(), none)?, SOON).await.err().context("it is verified")?;
    assert!(trouble.to_string().contains("no pooling"), "{trouble}");
    Ok(())
}

/// Writes a llama-server that runs a script for models of a given weight format, and then the real one.
async fn around_real(folder: &Path, of_a_form: &str) -> Result<PathBuf, Trouble> {
    let path = folder.join("llama-server");
    let real = llama_server().await?;
    let script = format!("case \" $* \" in *' form.gguf '*) {of_a_form};; esac");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\nexec '{}' \"$@\"\n", real.display()))?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

#[tokio::test]
async fn a_verified_build_has_computed_with_all_forms_of_weights_and_every_setting() -> Outcome {
    let real = llama_server().await?;
    let done = verify(&real, LONG, &EventReporter::silent(), &CancellationToken::new()).await?;
    let computed = done.computed.context("it gives probabilities")?;
    println!("{}", serde_json::to_string(&computed)?);
    assert_eq!(computed.unknown, Vec::<String>::new());
    for form in ["f16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "iq4_nl", "mxfp4"] {
        let trials: Vec<_> = computed.trials.iter().filter(|trial| trial.weights == form).collect();
        let settings: Vec<&str> = trials.iter().map(|trial| trial.setting.as_str()).collect();
        assert_eq!(settings, ["repacked", "--no-repack", "repacked, -fa on -ctk q8_0 -ctv q8_0"], "{form}");
        assert!(trials.iter().all(|trial| trial.distance <= trial.limit), "{trials:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_server_that_dies_of_repacked_weights_is_refused_with_form_and_setting() -> Outcome {
    let folder = tempfile::tempdir()?;
    let dies = "case \"$*\" in *--no-repack*) ;; *) kill -SEGV $$;; esac";
    let trouble =
        checked(&around_real(folder.path(), dies).await?, LONG).await.err().context("it is verified")?;
    let text = format!("{trouble:?}");
    assert!(text.contains("f16 weights (repacked)") && text.contains("SIGSEGV"), "{text}");
    Ok(())
}

#[tokio::test]
async fn a_server_that_computes_something_else_is_refused_with_its_distance() -> Outcome {
    let folder = tempfile::tempdir()?;
    // Another model with the same vocabulary lies in the same folder.
    let other = "case \"$*\" in *--no-repack*) set -- $(echo \"$*\" | sed 's/form.gguf/sample.gguf/');; esac";
    let trouble =
        checked(&around_real(folder.path(), other).await?, LONG).await.err().context("it is verified")?;
    let text = format!("{trouble:?}");
    assert!(
        text.contains("(--no-repack)") && text.contains("from those of the same numbers in f32"),
        "{text}"
    );
    Ok(())
}

/// A builder whose compiler reports AMX. Its build is the real llama-server, which dies of repacked weights
/// unless cmake is configured without AMX.
async fn machine_with_amx(folder: &Path) -> Result<Builder, Trouble> {
    let real = llama_server().await?;
    let dies = "case \"$*\" in *form.gguf*--no-repack*) ;; *form.gguf*) kill -SEGV $$;; esac";
    let bin = folder.join("bin");
    let amx = "*-march=native*-dM*) echo '#define __AMX_INT8__ 1';; *probe.cpp*) exit 1;;";
    let server = format!(
        "echo '#!/bin/sh'; grep -q U__AMX_INT8__ ../flags || echo '{dies}'; echo \"exec '{}' \\\"\\$@\\\"\"",
        real.display()
    );
    write_toolchain(&bin, amx, &server)?;
    write_source(&folder.join("source"))?;
    Ok(Builder {
        dirs: BuilderDirs { cache: folder.join("cache"), data: folder.join("data") },
        env: BuildEnvironment {
            path: format!("{}:/usr/bin:/bin", bin.display()).into(),
            ..BuildEnvironment::default()
        },
        memory: || None,
        reporter: EventReporter::silent(),
        cancel: CancellationToken::new(),
    })
}

#[tokio::test]
async fn a_build_that_dies_of_repacked_weights_is_made_again_without_amx_and_is_a_hit_the_next_time()
-> Outcome {
    let folder = tempfile::tempdir()?;
    let builder = machine_with_amx(folder.path()).await?;
    let request = BuildRequest {
        source: BuildSource::at(&folder.path().join("source"))?,
        backend: ComputeBackend::Cpu.into(),
        arch: CpuTarget::Native.into(),
        patches: warden_patches::SetSelection::default(),
        options: Vec::new(),
        jobs: Some(1),
        needs: MachineNeeds { disk: 0, memory: 0, memory_per_job: 1, memory_per_gpu_job: 1 },
        page_timeout: SOON,
        verify_timeout: LONG,
        priority: RunPriority::Inherited,
    };
    assert_eq!(builder.plan(&request).await?.amx, Some(AmxKernels::Compiled));
    let built = builder.build(&request).await?;
    let Some(AmxKernels::LeftOut(why)) = &built.provenance.plan.amx else {
        return Err(Trouble::new("AMX was not left out"));
    };
    assert!(why.contains("f16 weights (repacked)") && why.contains("SIGSEGV"), "{why}");
    assert!(built.provenance.verified.computed.is_some() && !built.hit);
    assert_eq!(builder.store().list()?.builds.len(), 1, "the one that failed is not in the store");
    let again = builder.build(&request).await?;
    assert!(again.hit && again.id == built.id);
    Ok(())
}

/// Returns the id in `build 0123456789abcdef`.
fn id_in(output: &str) -> Option<String> {
    let words: Vec<&str> = output.split_whitespace().collect();
    let is_id = |word: &str| word.len() == 16 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    words.windows(2).find(|two| two[0] == "build" && is_id(two[1])).map(|two| two[1].to_owned())
}

#[tokio::test]
async fn a_sample_model_is_small_and_the_same_for_the_same_seed() -> Outcome {
    let home = Home::new()?;
    let write = async |name: &str, seed: &str| {
        let ran = home.warden(["sample-model", "-o", name, "--seed", seed], SOON).await?;
        assert_eq!(ran.code, 0, "{ran:?}");
        Ok::<_, Trouble>(std::fs::read(home.path().join(name))?)
    };
    let (one, same, other) = (write("a", "1").await?, write("b", "1").await?, write("c", "2").await?);
    assert!(one == same && one != other && one.len() < 2_000_000 && one.starts_with(b"GGUF"));
    Ok(())
}

async fn quickstart(home: &Home) -> Result<String, Trouble> {
    let args = ["quickstart", "--exit", "--arch", "portable", "--port", "0", "-D", NO_PAGE];
    let ran = home.warden(args, LONG).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    for told in [
        "was in the store",
        "by hand: llama-warden build --sdist",
        "it said: ",
        "\"reason\":\"host_hard\"",
        " 0 requests failed",
    ] {
        assert!(ran.stdout.contains(told), "{told:?} is not told: {ran:?}");
    }
    assert!(working_in(home.path()).is_empty(), "nothing is left running");
    Ok(ran.stdout)
}

/// Removes the model's answer, the ledger's line and the store's path from the output.
fn shown(home: &Home, stdout: &str) -> Result<String, Trouble> {
    let store = binaries::store()?.display().to_string();
    let lines = stdout.lines().map(|line| {
        for varies in ["it said:", "cannot be downloaded here:"] {
            if let Some((before, _)) = line.split_once(varies) {
                return format!("{before}{varies} …\n");
            }
        }
        if line.trim_start().starts_with('{') { "      {…}\n".to_owned() } else { format!("{line}\n") }
    });
    let page =
        lines.collect::<String>().replace(&store, "~").replace(&home.path().display().to_string(), "~");
    Ok(crate::pages::without_figures(&nameless(&page)))
}

#[tokio::test]
async fn quickstart_builds_serves_answers_in_a_sentence_and_replaces_without_a_failed_request() -> Outcome {
    let Some(home) = home_with_store().await? else { return Ok(()) };
    if real_weights::smollm2().await?.is_none() {
        return Ok(());
    }
    let told = quickstart(&home).await?;
    let said = told.lines().find_map(|line| line.trim().strip_prefix("it said: ")).unwrap_or_default();
    assert!(real_weights::is_sentence(said) && said.contains("Pacific"), "{said:?}");
    assert!(told.contains("SmolLM2-135M-Instruct, licence Apache-2.0, sha256 b179c952"), "{told}");
    Ok(())
}

#[tokio::test]
async fn quickstart_without_a_network_says_so_and_serves_the_sample_model() -> Outcome {
    let Some(mut home) = home_with_store().await? else { return Ok(()) };
    // The downloads of the tests, except the weights.
    let (theirs, ours) = (binaries::store()?.join("cache"), home.path().join("cache"));
    for folder in ["sources", "tools"] {
        std::os::unix::fs::symlink(theirs.join(folder), ours.join(folder))?;
    }
    home.env.insert("LLAMA_WARDEN_PATHS__CACHE_DIR".into(), ours.into());
    home.env.insert("PIP_NO_INDEX".into(), "1".into());
    home.env.remove(OsStr::new("PIP_FIND_LINKS"));
    let told = quickstart(&home).await?;
    assert!(told.contains("SmolLM2-135M-Instruct cannot be downloaded here: "), "{told}");
    insta::assert_snapshot!(shown(&home, &told)?);
    Ok(())
}

/// Replaces the ids of builds in a text.
fn nameless(text: &str) -> String {
    let is_id = |word: &str| word.len() == 16 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    let pieces = text.split_inclusive(|letter: char| !letter.is_ascii_alphanumeric());
    let without = pieces.map(|piece| {
        let word = piece.trim_end_matches(|letter: char| !letter.is_ascii_alphanumeric());
        if is_id(word) { piece.replace(word, "ID") } else { piece.to_owned() }
    });
    without.collect()
}
