//! `llama-warden update` in a repository of simulated servers: an equal build is adopted under load, a worse
//! one is not, one that dies in service is taken back, and `rollback` returns. No request fails.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FileType, Mode};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use warden_rig::home::Ran;
use warden_rig::process::{Kid, ProcessId, children_of};
use warden_rig::real::SERVER_VARIABLE;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, wait_until};

use crate::history::{History, sets, tools};

const LONG: Duration = Duration::from_secs(400);

/// Short proofs and watch periods.
const NUMBERS: &str = "internal.proof.rounds_least = 2\ninternal.proof.rounds_most = 2\ninternal.proof.repeats = 1\n\
    internal.proof.answer = 8\ninternal.proof.prompt = 64\ninternal.update.sample_requests = 5\n\
    internal.update.look = \"100ms\"\ninternal.canary.share = 0.5\ninternal.canary.memory_requests = 40\n";

const CLIENTS: usize = 4;

struct Renewed {
    warden: Warden,
    history: History,
    config: PathBuf,
}

impl Renewed {
    /// Starts an instance with the oldest of these servers.
    async fn new(planted: &[&str], more: &str) -> Result<Self, Trouble> {
        // The first fault ends the watch, and a busy machine needs time for the request that brings it.
        let faulty = planted.iter().any(|set| set.contains("FAULTS"));
        let watch = format!("internal.update.watch = \"{}s\"", if faulty { 60 } else { 3 });
        let mut setup = Setup::new()?.top(NUMBERS).top(&watch);
        tools(&mut setup.home)?;
        let history = History::new(setup.home.path().join("history"), planted)?;
        let script =
            setup.home.file("script.json", json!({ "report": "none", "ms_per_token": 2 }).to_string())?;
        let model = setup.home.path().join("model.gguf");
        let lines = format!(
            "model = '{}'\nenv = {{ FAKE_LLAMA_SCRIPT = '{}' }}\nargs = [\"-np\", \"8\"]\npreload = true\non_death = \"continue\"\n",
            model.display(),
            script.display()
        );
        let source = format!("build.source = '{}'\n{more}", history.folder.display());
        let mut setup = setup.top(&source).model("m", &lines);
        let config = setup.home.file("warden.toml", setup.config())?;
        let git = history.folder.display().to_string();
        let built = [
            "build",
            "--git",
            &git,
            "--ref",
            "b9000",
            "--backend",
            "cpu",
            "--plain",
            "-D",
            "LLAMA_BUILD_UI=OFF",
        ];
        let ran = setup.home.warden(built, LONG).await?;
        assert_eq!(ran.code, 0, "{}", ran.all());
        // The environment names the configuration, as for a service, but the proof with the sample model must
        // ignore that.
        setup.home.env.insert("LLAMA_WARDEN_CONFIG".into(), config.clone().into());
        let warden = setup.start().await?;
        let renewed = Self { warden, history, config };
        renewed.warden.until_ready(1).await?;
        Ok(renewed)
    }

    async fn update(&self, more: &[&str]) -> Result<(Ran, Value), Trouble> {
        self.update_of(&[&["--git", &self.history.folder.to_string_lossy()], more].concat()).await
    }

    /// Runs an update from another source.
    async fn update_of(&self, more: &[&str]) -> Result<(Ran, Value), Trouble> {
        let ran = self.warden.home().warden(self.words(&[&["--json"], more].concat()), LONG).await?;
        let report = serde_json::from_str(&ran.stdout).context(ran.all())?;
        Ok((ran, report))
    }

    fn words(&self, more: &[&str]) -> Vec<OsString> {
        let own: [OsString; 3] = ["update".into(), "--config".into(), self.config.clone().into()];
        own.into_iter().chain(more.iter().map(OsString::from)).collect()
    }

    /// Runs an update and kills it once it has chosen a build, before it informs the instance.
    async fn update_killed_at_the_choice(&self, to: &str) -> Outcome {
        let home = self.warden.home();
        let git = self.history.folder.to_string_lossy();
        let args = self.words(&["--git", &git, "--to", to, "--no-canary", "--unproved"]);
        let program = warden_rig::binaries::llama_warden()?;
        let mut updating =
            Kid::start(&program, &args, &home.env, home.path(), home.path().join("killed.log"))?;
        let chosen = home.path().join("data/builds/.chosen.json");
        let moving = chosen.with_extension("json.move");
        let read = |path: &Path| serde_json::from_slice::<Value>(&std::fs::read(path).ok()?).ok();
        wait_until("a build is chosen and seen to", LONG, async || {
            let ended = updating.ended();
            assert!(ended.is_none(), "{ended:?}: {}", updating.output());
            let (Some(moving), Some(chosen)) = (read(&moving), read(&chosen)) else { return false };
            let last = chosen["chosen"].as_array().and_then(|all| all.last());
            last.is_some_and(|last| last["build"] == moving["build"])
        })
        .await?;
        updating.signal(Signal::KILL);
        updating.exit(SOON).await?;
        Ok(())
    }

    async fn rollback(&self) -> Result<Ran, Trouble> {
        self.rollback_with(&[]).await
    }

    async fn rollback_with(&self, args: &[&str]) -> Result<Ran, Trouble> {
        let mut words = vec![OsString::from("rollback"), "--config".into(), self.config.clone().into()];
        words.extend(args.iter().map(OsString::from));
        self.warden.setup.home.warden(words, LONG).await
    }

    fn programs(&self) -> Vec<String> {
        let folder = self.warden.setup.home.path().join("data/builds");
        let of = |word: &str| {
            let build = Path::new(word).parent()?;
            (build.parent()? == folder)
                .then(|| build.file_name().map(|name| name.to_string_lossy().into_owned()))?
        };
        let backends = self.warden.backends();
        backends.iter().filter_map(|process| of(process.command_line().first()?)).collect()
    }

    fn serves(&self) -> Option<String> {
        let mut all = self.programs();
        (all.len() == 1).then(|| all.remove(0))
    }
}

/// Sends requests without a pause until stopped; returns the number of answers, and the errors.
async fn load(http: &Http, stop: &CancellationToken) -> (usize, Vec<String>) {
    let (mut answered, mut wrong) = (0, Vec::new());
    while !stop.is_cancelled() {
        let stream = answered % 2 == 0;
        let body = chat(&format!("r{answered}"), "m", &format!("word {answered}"), 12, stream);
        match http.post(CHAT, &body).await {
            Ok(answer) if answer.status.is_success() && !answer.text().contains("\"error\"") => answered += 1,
            Ok(answer) => wrong.push(format!("{}: {}", answer.status, answer.text())),
            Err(error) => wrong.push(error.to_string()),
        }
    }
    (answered, wrong)
}

async fn under_load<T>(http: &Http, work: impl Future<Output = Result<T, Trouble>>) -> Result<T, Trouble> {
    let stop = CancellationToken::new();
    let clients = futures_util::future::join_all((0..CLIENTS).map(|_| load(http, &stop)));
    let working = async {
        let done = work.await;
        stop.cancel();
        done
    };
    let (done, answers) = tokio::join!(working, clients);
    let wrong: Vec<&String> = answers.iter().flat_map(|(_, wrong)| wrong).collect();
    assert!(
        wrong.is_empty(),
        "{} of many failed: {:?}",
        wrong.len(),
        wrong.iter().take(3).collect::<Vec<_>>()
    );
    assert!(answers.iter().all(|(answered, _)| *answered > 0), "nobody asked");
    done
}

#[tokio::test]
async fn a_build_that_is_as_good_comes_in_under_load_and_rollback_leads_back() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let renewed = Renewed::new(&["", "", ""], "").await?;
    let old = renewed.serves().context("a process of the first build")?;
    let (ran, plan) = renewed.update(&["--plan"]).await?;
    assert_eq!(
        (ran.code, &plan["outcome"], &plan["commits"]),
        (0, &json!("planned"), &json!(2)),
        "{}",
        ran.all()
    );
    assert_eq!(plan["subjects"][0], "b9002 server : change number 2", "{}", ran.all());
    assert_eq!(renewed.serves().as_ref(), Some(&old), "a plan changes nothing");
    let http = renewed.warden.http.clone();
    let (ran, report) = under_load(&http, renewed.update(&[])).await?;
    assert_eq!((ran.code, &report["outcome"]), (0, &json!("in_use")), "{}", ran.all());
    let new = report["new"]["build"].as_str().context("a build")?.to_owned();
    assert_ne!(new, old);
    assert_eq!(renewed.serves(), Some(new.clone()), "{}", ran.all());
    assert_eq!(report["proof"]["verdict"], "same", "{}", ran.all());
    let tried = report["notes"].to_string();
    assert!(tried.contains("`m`: as good on") || tried.contains("`m`: not worse on"), "{}", ran.all());
    let (ran, report) = renewed.update(&[]).await?;
    assert_eq!((ran.code, &report["outcome"]), (0, &json!("nothing_new")), "{}", ran.all());
    let ran = renewed.rollback_with(&["--plan"]).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stdout.contains(&format!("back to build {old}")), "{}", ran.all());
    assert_eq!(renewed.serves(), Some(new), "a plan changes nothing: {}", ran.all());
    let ran = under_load(&http, renewed.rollback()).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert_eq!(renewed.serves(), Some(old), "{}", ran.all());
    // A build that was taken back is not tried again, and there is no build before the first.
    let (ran, report) = renewed.update(&[]).await?;
    assert_eq!((ran.code, &report["outcome"]), (3, &json!("was_rejected")), "{}", ran.all());
    let ran = renewed.rollback().await?;
    assert!(ran.code == 2 && ran.stderr.contains("no build to go back to"), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn a_build_that_is_worse_never_serves_and_one_that_dies_in_service_is_taken_back() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let other_answers = sets("TOKEN_BYTES", "24");
    let dies = sets("FAULTS", "[{\\\"from\\\":150,\\\"do\\\":\\\"crash\\\"}]");
    let renewed = Renewed::new(&["", &other_answers, &dies], "").await?;
    let old = renewed.serves().context("a process of the first build")?;
    let http = renewed.warden.http.clone();
    let (ran, report) = under_load(&http, renewed.update(&["--to", "b9001"])).await?;
    assert_eq!((ran.code, &report["outcome"]), (3, &json!("rejected")), "{}", ran.all());
    assert!(report["reasons"][0].as_str().is_some_and(|why| why.starts_with("answers: ")), "{}", ran.all());
    assert_eq!(renewed.serves().as_ref(), Some(&old), "{}", ran.all());
    let (ran, report) = under_load(&http, renewed.update(&["--to", "b9002", "--no-canary"])).await?;
    assert_eq!((ran.code, &report["outcome"]), (3, &json!("taken_back")), "{}", ran.all());
    assert!(report["reasons"][0].as_str().is_some_and(|why| why.contains("died")), "{}", ran.all());
    assert_eq!(renewed.serves(), Some(old), "{}", ran.all());
    // With a canary the build is rejected earlier, and no client is affected.
    let (ran, report) = under_load(&http, renewed.update(&["--to", "b9002", "--again"])).await?;
    assert_eq!((ran.code, &report["outcome"]), (3, &json!("rejected")), "{}", ran.all());
    assert!(
        report["reasons"][0].as_str().is_some_and(|why| why.starts_with("canary of `m` after")),
        "{}",
        ran.all()
    );
    let listed = renewed.warden.setup.home.warden(["builds", "list"], SOON).await?;
    assert_eq!(listed.stdout.matches("rejected").count(), 2, "{}", listed.all());
    assert_eq!(listed.stdout.matches("in use").count(), 1, "{}", listed.all());
    Ok(())
}

#[tokio::test]
async fn what_is_older_is_nothing_new_unless_it_is_named_and_what_would_not_start_is_refused() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    // The second build lacks a flag of the first.
    let planted = [sets("HELP", "old"), sets("HELP", "new")];
    let renewed = Renewed::new(&[&planted[0], &planted[1]], "update.track = \"b9000\"\n").await?;
    let old = renewed.serves().context("a process of the first build")?;
    let at_once = ["--unproved", "--no-canary"];
    let gone = ["--to", "b9001", "--set", "models.m.args=['-np', '8', '--mlock']"];
    let ran = renewed.warden.home().warden(renewed.words(&[&at_once[..], &gone].concat()), LONG).await?;
    assert!(ran.code != 0 && ran.stderr.contains("cannot be used as it is configured"), "{}", ran.all());
    assert!(ran.stderr.contains("has no flag `--mlock`"), "{}", ran.all());
    assert_eq!(renewed.serves().as_ref(), Some(&old), "{}", ran.all());
    let (ran, report) = renewed.update(&[&at_once[..], &["--to", "b9001"]].concat()).await?;
    assert_eq!((ran.code, &report["outcome"]), (0, &json!("in_use")), "{}", ran.all());
    let new = renewed.serves();
    for more in [&["--plan"][..], &at_once] {
        let (ran, report) = renewed.update(more).await?;
        assert_eq!((ran.code, &report["outcome"]), (0, &json!("nothing_new")), "{}", ran.all());
        assert_eq!(report["reasons"], json!(["it is an ancestor of the revision in use"]), "{}", ran.all());
        assert_eq!(renewed.serves(), new, "{}", ran.all());
    }
    let git = renewed.history.folder.to_string_lossy();
    let ran = renewed.warden.home().warden(renewed.words(&["--git", &git]), LONG).await?;
    assert!(ran.code == 0 && ran.stdout.contains("name it with `--to`"), "{}", ran.all());
    let (ran, report) = renewed.update(&[&at_once[..], &["--to", "b9000"]].concat()).await?;
    assert_eq!((ran.code, &report["outcome"]), (0, &json!("in_use")), "{}", ran.all());
    assert_eq!(renewed.serves(), Some(old), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn an_update_that_is_killed_is_seen_through_by_the_next_and_a_rollback_that_nobody_heard_goes_no_further()
-> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let dies = sets("FAULTS", "[{\\\"from\\\":20,\\\"do\\\":\\\"crash\\\"}]");
    let mut renewed = Renewed::new(&["", "", &dies], "").await?;
    let first = renewed.serves().context("a process of the first build")?;
    renewed.update_killed_at_the_choice("b9001").await?;
    let (ran, report) = renewed.update(&["--to", "b9001"]).await?;
    assert_eq!((ran.code, &report["outcome"]), (0, &json!("nothing_new")), "{}", ran.all());
    assert!(
        report["notes"][0].as_str().is_some_and(|note| note.contains("is in use by pid")),
        "{}",
        ran.all()
    );
    let second = renewed.serves().context("a process of the second build")?;
    assert_ne!(second, first, "{}", ran.all());
    // One adoption is enough.
    let (ran, report) = renewed.update(&["--to", "b9001"]).await?;
    assert_eq!((ran.code, &report["notes"]), (0, &json!([])), "{}", ran.all());

    // The next build dies while only the update watches it.
    renewed.update_killed_at_the_choice("b9002").await?;
    let http = renewed.warden.http.clone();
    let (ran, report) = under_load(&http, renewed.update(&["--to", "b9002"])).await?;
    assert_eq!(report["outcome"], "taken_back", "{}", ran.all());
    assert!(ran.code == 3 && ran.stderr.contains("was taken back"), "{}", ran.all());
    assert_eq!(renewed.serves().as_ref(), Some(&second), "{}", ran.all());

    // An interrupted rollback: the choice is written, but not applied.
    let path = renewed.warden.home().path().join("data/builds/.chosen.json");
    let cut_off = || -> Outcome {
        let mut choices: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        let left = choices["chosen"].as_array_mut().and_then(Vec::pop).context("a choice")?;
        std::fs::write(&path, choices.to_string())?;
        let moving = json!({ "build": left["build"], "back": true });
        std::fs::write(path.with_extension("json.move"), moving.to_string())?;
        Ok(())
    };
    cut_off()?;
    let ran = under_load(&http, renewed.rollback()).await?;
    assert!(ran.code == 0 && ran.stdout.contains("is in use already"), "{}", ran.all());
    assert_eq!(renewed.serves().as_ref(), Some(&first), "{}", ran.all());
    // The operator chooses the second build, and the next update finds the interrupted choice.
    let ran = renewed.warden.home().warden(["builds", "use", &second], SOON).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    renewed.warden.kid.signal(Signal::HUP);
    wait_until("the build that was chosen serves", LONG, async || renewed.serves().as_ref() == Some(&second))
        .await?;
    cut_off()?;
    let (ran, report) = under_load(&http, renewed.update(&["--to", "b9000"])).await?;
    assert_eq!((ran.code, &report["outcome"]), (0, &json!("nothing_new")), "{}", ran.all());
    assert!(report["notes"][0].as_str().is_some_and(|note| note.contains("is not run by")), "{}", ran.all());
    assert_eq!(renewed.serves(), Some(first), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn the_newest_source_archive_that_pip_finds_comes_in_under_load() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let mut renewed = Renewed::new(&[""], "").await?;
    let old = renewed.serves().context("a process of the first build")?;
    let index = renewed.warden.home().path().join("index");
    let version = archive(&renewed.history.folder, &index)?;
    let env = &mut renewed.warden.setup.home.env;
    env.insert("PIP_NO_INDEX".into(), "1".into());
    env.insert("PIP_FIND_LINKS".into(), index.clone().into());
    let http = renewed.warden.http.clone();
    let (ran, report) = under_load(&http, renewed.update_of(&["--sdist"])).await?;
    assert_eq!((ran.code, &report["outcome"]), (0, &json!("in_use")), "{}", ran.all());
    assert_eq!(report["follows"], format!("llama-cpp-python {version}"), "{}", ran.all());
    assert!(renewed.serves().is_some_and(|build| build != old), "{}", ran.all());
    let (ran, report) = renewed.update_of(&["--sdist"]).await?;
    assert_eq!((ran.code, &report["outcome"]), (0, &json!("nothing_new")), "{}", ran.all());
    Ok(())
}

/// Makes a pip source package with a different server; returns its unique version.
fn archive(tree: &Path, index: &Path) -> Result<String, Trouble> {
    let server = std::fs::read_to_string(tree.join("tools/server/server.c"))? + "/* newer */\n";
    let bytes = server.bytes().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    let version = format!("99.{bytes}");
    let name = format!("llama_cpp_python-{version}");
    let root = index.join(&name);
    let inner = root.join("vendor/llama.cpp");
    let backend = format!(
        "import os\ndef prepare_metadata_for_build_wheel(folder, settings=None):\n    name = '{name}.dist-info'\n    \
         os.makedirs(os.path.join(folder, name))\n    with open(os.path.join(folder, name, 'METADATA'), 'w') as file:\n        \
         file.write('Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: {version}\\n')\n    return name\n"
    );
    let project = format!(
        "[build-system]\nrequires = []\nbuild-backend = \"backend\"\nbackend-path = [\".\"]\n[project]\n\
         name = \"llama-cpp-python\"\nversion = \"{version}\"\n"
    );
    for (path, text) in [
        (root.join("pyproject.toml"), project),
        (root.join("backend.py"), backend),
        (inner.join("CMakeLists.txt"), std::fs::read_to_string(tree.join("CMakeLists.txt"))?),
        (inner.join("ggml/CMakeLists.txt"), "# nothing here\n".to_owned()),
        (inner.join("tools/server/CMakeLists.txt"), "# nothing here\n".to_owned()),
        (inner.join("tools/server/server.c"), server),
    ] {
        std::fs::create_dir_all(path.parent().context("a file has a folder")?)?;
        std::fs::write(path, text)?;
    }
    let made = std::process::Command::new("tar")
        .arg("-C")
        .arg(index)
        .arg("-czf")
        .arg(index.join(format!("{name}.tar.gz")))
        .arg(&name)
        .status()?;
    std::fs::remove_dir_all(root)?;
    if made.success() { Ok(version) } else { Err(Trouble::new(format!("tar: {made}"))) }
}

#[tokio::test]
async fn with_llama_warden_ends_the_update_that_it_wanted_and_every_compiler() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    // The compiler waits for a file that never appears.
    let folder = tempfile::tempdir()?;
    let never = folder.path().join("never.h");
    rustix::fs::mknodat(rustix::fs::CWD, &never, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    let waits = format!("#include \"{}\"", never.display());
    for hard in [false, true] {
        let mut renewed =
            Renewed::new(&["", &waits], "update.every = \"1s\"\nupdate.track = \"main\"\n").await?;
        let mut all = Vec::new();
        wait_until("a compiler is at work for the update", LONG, async || {
            all = descendants(renewed.warden.kid.pid());
            let compiles = |one: &&ProcessId| {
                let line = one.command_line().join(" ");
                line.contains("cc1") && line.contains("server.c")
            };
            all.iter().any(|one| compiles(&one))
        })
        .await?;
        if hard {
            renewed.warden.kid.signal(Signal::KILL);
        } else {
            assert_eq!(renewed.warden.terminate(SOON).await?, 0, "{}", renewed.warden.kid.output());
        }
        Warden::until_gone(&all, SOON).await?;
    }
    Ok(())
}

fn descendants(pid: i32) -> Vec<ProcessId> {
    let mut all = children_of(pid);
    let mut next = 0;
    while let Some(one) = all.get(next) {
        all.extend(children_of(one.pid));
        next += 1;
    }
    all
}

#[tokio::test]
async fn by_its_own_schedule_a_branch_is_followed_and_the_log_says_so() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let mut renewed = Renewed::new(
        &["", ""],
        "update.every = \"2s\"\nupdate.track = \"main\"\ninternal.update.canary = \"3s\"\n",
    )
    .await?;
    let old = renewed.serves().context("a process of the first build")?;
    wait_until("the new build serves", LONG, async || renewed.serves().is_some_and(|build| build != old))
        .await?;
    renewed.warden.says("is in use by pid").await?;
    let answer = renewed.warden.http.post(CHAT, &chat("x", "m", "hi", 4, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_renewed_is_told_and_nothing_changes() -> Outcome {
    let mut setup = Setup::new()?.top(NUMBERS);
    tools(&mut setup.home)?;
    let history = History::new(setup.home.path().join("history"), &[""])?;
    let git = history.folder.display().to_string();
    let ran = setup.home.warden(["update", "--git", &git], SOON).await?;
    assert!(ran.code == 1 && ran.stderr.contains("llama-warden build"), "{}", ran.all());
    let ran = setup.home.warden(["rollback"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("no build to go back to"), "{}", ran.all());
    let ran = setup.home.warden(["builds", "use", "0123456789abcdef"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("there is no build"), "{}", ran.all());
    Ok(())
}
