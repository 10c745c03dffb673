//! Packages are reproducible, install into a clean root, serve, are upgraded while they serve, and purge
//! cleanly.
//!
//! They contain the program of the other tests. Maintainer scripts run as dpkg runs them for another root,
//! with `DPKG_ROOT`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warden_rig::home::Home;
use warden_rig::process::{Kid, children_of};
use warden_rig::warden::{CHAT, SOON, chat};
use warden_rig::{Context as _, Http, Outcome, Trouble, binaries, swarm, wait_for};

const LONG: Duration = Duration::from_secs(240);

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns true if this machine has the Debian tools, and allows their use.
fn can() -> bool {
    let has =
        |program| Command::new(program).arg("--version").output().is_ok_and(|told| told.status.success());
    let is_root = rustix::process::getuid().is_root();
    is_root && ["dpkg", "dpkg-deb", "dpkg-shlibdeps", "strip", "python3"].into_iter().all(has)
}

/// A home in which cargo finds its files, to list the linked crates.
fn with_cargo(mut home: Home) -> Home {
    for (name, folder) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")] {
        let usual = || Some(Path::new(&std::env::var_os("HOME")?).join(folder).into_os_string());
        if let Some(place) = std::env::var_os(name).or_else(usual) {
            home.env.insert(name.into(), place);
        }
    }
    home
}

async fn made(home: &Home, version: &str, folder: &str) -> Result<Vec<PathBuf>, Trouble> {
    let script = here().join("packaging/build.sh");
    let (binary, out) = (binaries::llama_warden()?, home.path().join(folder));
    let words = ["--quick", "--version", version, "--binary"].map(Into::into);
    let words =
        words.into_iter().chain([binary.into_os_string(), "--out".into(), out.clone().into_os_string()]);
    let ran = home.run(&script, words, LONG).await?;
    if ran.code != 0 {
        return Err(Trouble::new(format!("{ran:?}")));
    }
    Ok(ran.stdout.lines().map(PathBuf::from).collect())
}

fn files(root: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(path.clone());
            }
            found.insert(path.strip_prefix(root).map(Path::to_owned).unwrap_or(path));
        }
    }
    found
}

/// Runs dpkg in another root; dependencies come from this machine.
fn dpkg(root: &Path, words: &[&str]) -> Outcome {
    let told = Command::new("dpkg")
        .arg(format!("--root={}", root.display()))
        .args(["--force-script-chrootless", "--force-depends", "--no-triggers"])
        .args(words)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .output()?;
    if told.status.success() { Ok(()) } else { Err(Trouble::new(format!("dpkg {words:?}: {told:?}"))) }
}

async fn served(home: &Home, root: &Path) -> Result<(Kid, Http), Trouble> {
    let models = format!("paths.models=[\"{}\"]", root.join("var/lib/llama-warden/models").display());
    let access = format!("log.access={}", root.join("var/log/llama-warden/access.log").display());
    let args = [
        "serve",
        "--config",
        "ROOT/etc/llama-warden/warden.toml",
        "--port",
        "0",
        "--set",
        &models,
        "--set",
        &access,
    ];
    let mut args: Vec<_> =
        args.iter().map(|word| word.replace("ROOT", &root.to_string_lossy()).into()).collect();
    args.extend(["--binary".into(), binaries::fake_llama()?.into_os_string()]);
    let mut env: BTreeMap<_, _> = home.env.clone();
    for (name, folder) in
        [("XDG_STATE_HOME", "var/lib"), ("XDG_DATA_HOME", "var/lib"), ("XDG_CACHE_HOME", "var/cache")]
    {
        env.insert(name.into(), root.join(folder).into_os_string());
    }
    let mut kid = Kid::start(
        &root.join("usr/bin/llama-warden"),
        &args,
        &env,
        home.path(),
        home.path().join("served.log"),
    )?;
    kid.says("listening on", SOON).await?;
    let address = wait_for("an address", SOON, async || {
        let output = kid.output();
        let after = output.split_once("listening on http://")?.1;
        after.split_once('\n')?.0.trim().parse().ok()
    });
    let http = Http::Tcp(address.await?);
    Ok((kid, http))
}

async fn answers(http: &Http, model: &str) -> Outcome {
    let answer = http.post(CHAT, &chat("a", model, "hello", 3, false)).await?;
    if answer.status.is_success() { Ok(()) } else { Err(Trouble::new(format!("{answer:?}"))) }
}

/// Runs the package's own script, with other places for systemd and its state. An upgrade that does not start
/// changes nothing; one that starts takes over while clients send requests.
async fn configured_under_load(home: &Home, root: &Path, kid: &Kid, http: &Http) -> Outcome {
    let place = |folder: &str| root.join(folder).to_string_lossy().into_owned();
    let script = std::fs::read_to_string(here().join("packaging/deb/postinst"))?
        .replace("/run/systemd/system", &place("var/lib"))
        .replace("$DPKG_ROOT/var/lib/", &format!("{}/", place("var/lib")));
    let script = home.file("postinst", script)?;
    let tools = home.path().join("tools");
    std::fs::create_dir_all(&tools)?;
    let said = home.path().join("tools.log");
    for tool in ["systemctl", "deb-systemd-invoke", "deb-systemd-helper", "systemd-sysusers", "runuser"] {
        home.program(
            &format!("tools/{tool}"),
            format!("#!/bin/sh\necho {tool} \"$@\" >>'{}'\n", said.display()),
        )?;
    }
    let program = place("usr/bin/llama-warden");
    let configure = async |upgrade: &str| {
        home.program("tools/llama-warden", format!("#!/bin/sh\n{upgrade}\n"))?;
        let mut command = tokio::process::Command::new("/bin/sh");
        let path = format!("{}:/usr/bin:/bin", tools.display());
        command
            .arg(&script)
            .args(["configure", "0.0.1"])
            .envs(&home.env)
            .env("PATH", path)
            .env_remove("DPKG_ROOT");
        let ran =
            tokio::time::timeout(LONG, command.kill_on_drop(true).output()).await.context("it hangs")??;
        let told = String::from_utf8_lossy(&ran.stderr).into_owned();
        if ran.status.success() { Ok(told) } else { Err(Trouble::new(format!("{ran:?}"))) }
    };
    let servers = || -> BTreeSet<_> {
        let all = children_of(kid.pid()).into_iter().filter(|child| child.http().is_some());
        all.map(|child| child.pid).collect()
    };
    let before = servers();
    assert_eq!(before.len(), 1);

    let told = configure("echo 'it does not come up' >&2; exit 1").await?;
    assert!(told.contains("does not come up") && told.contains("goes on as it was"), "{told}");
    answers(http, "tiny").await?;
    let asked = std::fs::read_to_string(&said)?;
    assert!(asked.contains("systemctl is-active") && !asked.contains("restart"), "{asked}");

    let over = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for client in 0..4 {
        let (http, over) = (http.clone(), Arc::clone(&over));
        clients.spawn(async move {
            let mut asked = 0_u32;
            while !over.load(Ordering::SeqCst) {
                let request = chat(&format!("c{client}-{asked}"), "tiny", "hello", 20, client % 2 == 0);
                swarm::answer(&http, &request).await?;
                asked += 1;
            }
            Ok::<_, Trouble>(asked)
        });
    }
    let told = configure(&format!("exec '{program}' upgrade --to '{program}'")).await?;
    assert!(!told.contains("goes on as it was"), "{told}");
    over.store(true, Ordering::SeqCst);
    while let Some(asked) = clients.join_next().await {
        assert!(asked.context("a client")?? > 0, "each has asked meanwhile");
    }
    answers(http, "tiny").await?;
    assert_eq!(servers(), before, "no model is loaded anew");
    Ok(())
}

#[tokio::test]
async fn a_package_is_installed_works_is_upgraded_while_it_serves_and_leaves_nothing_when_purged() -> Outcome
{
    if !can() {
        return Ok(());
    }
    let home = with_cargo(Home::with_fake(&json!({}))?);
    let (old, new) = (made(&home, "0.0.1", "old").await?, made(&home, "0.0.2", "new").await?);
    let deb = |made: &[PathBuf]| made[1].to_string_lossy().into_owned();
    let root = home.path().join("root");
    for folder in ["var/lib/dpkg/info", "var/lib/dpkg/updates", "etc"] {
        std::fs::create_dir_all(root.join(folder))?;
    }
    home.file("root/var/lib/dpkg/status", "")?;
    home.file("root/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")?;
    home.file("root/etc/group", "root:x:0:\n")?;
    let before = files(&root);

    // The package declares its libraries, and every configuration file as such.
    let control = Command::new("dpkg-deb").args(["--field", &deb(&old), "Depends"]).output()?;
    let depends = String::from_utf8_lossy(&control.stdout).into_owned();
    assert!(depends.contains("libc6 (>="), "{depends}");
    dpkg(&root, &["--install", &deb(&old)])?;
    for file in [
        "usr/bin/llama-warden",
        "usr/lib/systemd/system/llama-warden.service",
        "usr/share/man/man1/llama-warden-serve.1.gz",
        "usr/share/bash-completion/completions/llama-warden",
        "usr/share/zsh/vendor-completions/_llama-warden",
        "usr/share/fish/vendor_completions.d/llama-warden.fish",
        "usr/share/doc/llama-warden/copyright",
        "etc/logrotate.d/llama-warden",
        "var/lib/llama-warden/models",
    ] {
        assert!(root.join(file).exists(), "{file}");
    }
    let unit = std::fs::read_to_string(root.join("usr/lib/systemd/system/llama-warden.service"))?;
    assert!(
        unit.contains("ExecStart=/usr/bin/llama-warden serve --config /etc/llama-warden/warden.toml\n"),
        "{unit}"
    );

    // The service runs with the shipped configuration, first without a model, then with one.
    std::fs::create_dir_all(root.join("var/log/llama-warden"))?;
    let (mut kid, http) = served(&home, &root).await?;
    assert!(http.get("/v1/models").await?.json()?["data"].as_array().is_some_and(Vec::is_empty));
    let sample = root.join("var/lib/llama-warden/models/tiny.gguf");
    home.sample_model(sample.to_str().context("a path")?).await?;
    wait_for("the model that was put there answers", SOON, async || answers(&http, "tiny").await.ok())
        .await?;

    // During an upgrade, the running service keeps the old program, and changed files stay.
    let config = root.join("etc/llama-warden/warden.toml");
    let changed = format!("{}\n# ours\n", std::fs::read_to_string(&config)?);
    std::fs::write(&config, &changed)?;
    dpkg(&root, &["--install", &deb(&new)])?;
    answers(&http, "tiny").await?;
    assert_eq!(std::fs::read_to_string(&config)?, changed);
    configured_under_load(&home, &root, &kid, &http).await?;
    kid.signal(Signal::TERM);
    assert_eq!(kid.exit(SOON).await?, 0);
    let (mut kid, http) = served(&home, &root).await?;
    answers(&http, "tiny").await?;
    kid.signal(Signal::TERM);
    assert_eq!(kid.exit(SOON).await?, 0);

    // Removing keeps configuration and models; purging keeps only models.
    dpkg(&root, &["--remove", "llama-warden"])?;
    assert!(!root.join("usr/bin/llama-warden").exists() && config.exists());
    assert!(root.join("var/lib/llama-warden/ledger.jsonl").exists(), "{:?}", files(&root));
    dpkg(&root, &["--purge", "llama-warden"])?;
    let is_kept = |path: &&PathBuf| {
        // dpkg's own database, and the accounts of the service, whose ids may own files elsewhere.
        let books = ["var/lib/dpkg", "etc/passwd", "etc/group", "etc/shadow", "etc/gshadow", "etc/.pwd.lock"];
        !books.iter().any(|book| path.starts_with(book))
            && !path.ends_with("passwd-")
            && !path.ends_with("group-")
    };
    let left: Vec<PathBuf> = files(&root).difference(&before).filter(is_kept).cloned().collect();
    // dpkg keeps folders that all packages share.
    let left: Vec<&PathBuf> =
        left.iter().filter(|path| path.to_string_lossy().contains("llama-warden")).collect();
    let models =
        ["var/lib/llama-warden", "var/lib/llama-warden/models", "var/lib/llama-warden/models/tiny.gguf"];
    assert_eq!(left, models.map(PathBuf::from).iter().collect::<Vec<_>>());
    Ok(())
}

#[expect(clippy::print_stderr, reason = "for whoever reads what tests say")]
fn say(why: &str) {
    eprintln!("{why}");
}

/// Runs in an unpacked Debian with a real systemd as process 1, if namespaces are available.
#[tokio::test]
async fn on_a_machine_of_its_own_a_package_serves_as_its_user_is_upgraded_under_load_and_comes_back_when_killed()
-> Outcome {
    let Some(machine) = std::env::var_os("WARDEN_TEST_MACHINE").filter(|_| can()) else { return Ok(()) };
    let home = with_cargo(Home::new()?);
    let (old, new) = (made(&home, "0.0.1", "old").await?, made(&home, "0.0.2", "new").await?);
    let model = home.path().join("tiny.gguf");
    home.sample_model(model.to_str().context("a path")?).await?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("it/package/machine.sh");
    let words =
        [script.into_os_string(), home.path().into(), machine, old[1].clone().into(), new[1].clone().into()];
    let words = words.into_iter().chain([binaries::fake_llama()?.into(), model.into()]);
    let ran = home.run(Path::new("/bin/bash"), words, LONG).await?;
    let told: Vec<&str> = ran.stdout.lines().filter_map(|line| line.strip_prefix("TOLD ")).collect();
    if let Some(why) = told.iter().find(|line| line.starts_with("skipped")) {
        say(&format!("no machine of its own: {why}"));
        return Ok(());
    }
    let exposed = told.iter().find_map(|line| line.strip_prefix("exposed ")?.parse::<f64>().ok());
    assert!(exposed.is_some_and(|exposed| exposed < 3.0), "{told:#?}");
    let rest: Vec<&str> = told.iter().copied().filter(|line| !line.starts_with("exposed")).collect();
    let wanted = [
        "installed 0.0.1",
        "enabled enabled active as llama-warden",
        "answers",
        "upgraded 0.0.2",
        "failed 0",
        "same",
        "anew",
        "patient",
        "stopped inactive success 0 left",
        "journal",
        "again active root 755",
        "purged 0 tiny.gguf",
        "nothing_left",
    ];
    assert_eq!(rest, wanted, "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn two_builds_of_the_packages_have_one_hash_and_say_what_is_in_them() -> Outcome {
    if !can() {
        return Ok(());
    }
    let home = with_cargo(Home::new()?);
    let (first, second) =
        (made(&home, "0.0.1", "first").await?, made(&home, "0.0.1", "a/second/place").await?);
    let sums = |made: &[PathBuf]| std::fs::read_to_string(&made[2]);
    let [one, two] = [sums(&first)?, sums(&second)?];
    assert_eq!(one, two);
    assert_eq!(one.lines().count(), 2, "{one}");
    let checked = Command::new("sha256sum")
        .args(["--check", "SHA256SUMS"])
        .current_dir(home.path().join("first"))
        .output()?;
    assert!(checked.status.success(), "{checked:?}");

    // `cargo tree` must list the same linked crates.
    let unpacked = Command::new("tar")
        .arg("-xzOf")
        .arg(&first[0])
        .args(["--wildcards", "*/llama-warden.cdx.json"])
        .output()?;
    let list: Value = serde_json::from_slice(&unpacked.stdout)?;
    assert_eq!(
        (&list["bomFormat"], &list["metadata"]["component"]["version"]),
        (&json!("CycloneDX"), &json!("0.0.1"))
    );
    let named = |one: &Value| {
        format!(
            "{} {}",
            one["name"].as_str().unwrap_or_default(),
            one["version"].as_str().unwrap_or_default()
        )
    };
    let listed: BTreeSet<String> =
        list["components"].as_array().context("components")?.iter().map(named).collect();
    let tree = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--package",
            "llama-warden",
            "--edges",
            "normal,build",
            "--prefix",
            "none",
            "--locked",
            "--offline",
        ])
        .args(["--format", "{p}"])
        .current_dir(here())
        .output()?;
    let tree = String::from_utf8_lossy(&tree.stdout).into_owned();
    let linked: BTreeSet<String> = tree
        .lines()
        .filter_map(|line| {
            let (name, rest) = line.split_once(" v")?;
            Some(format!("{name} {}", rest.split(' ').next()?))
        })
        .filter(|one| !one.starts_with("llama-warden "))
        .collect();
    assert!(linked.len() > 100, "{tree}");
    let missing: Vec<_> = linked.difference(&listed).collect();
    assert!(missing.is_empty(), "not in the list: {missing:?}");
    for one in list["components"].as_array().context("components")? {
        let name = one["name"].as_str().unwrap_or_default();
        assert!(
            name.starts_with("warden-") || one["hashes"][0]["content"].is_string(),
            "without a checksum: {one}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn completions_and_pages_are_of_the_whole_command_line() -> Outcome {
    let home = Home::new()?;
    let help = home.warden(["--help"], SOON).await?.stdout;
    let (_, commands) = help.split_once("Commands:").context("commands")?;
    let names = commands.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<&str> = names
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| !name.starts_with('-'))
        .collect();
    assert!(names.len() > 20, "{names:?}");
    for shell in ["bash", "zsh", "fish"] {
        let script = home.warden(["completions", shell], SOON).await?;
        assert!(script.code == 0 && names.iter().all(|name| script.stdout.contains(name)), "{shell}");
        let file = home.file(shell, &script.stdout)?;
        // If the shell is installed, it parses the file without a message.
        if let Ok(read) = Command::new(shell).arg("-n").arg(&file).output() {
            assert!(read.status.success() && read.stderr.is_empty(), "{shell}: {read:?}");
        }
    }
    let pages = home.warden(["man", "pages"], SOON).await?;
    assert_eq!(pages.code, 0, "{pages:?}");
    for name in names {
        let page = home.path().join(format!("pages/llama-warden-{name}.1"));
        let text = std::fs::read_to_string(&page).context(page.display())?;
        assert!(text.contains(".TH") && !text.contains(home.path().to_string_lossy().as_ref()), "{name}");
    }
    Ok(())
}
