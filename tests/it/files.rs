//! Promise: llama-warden never changes foreign files in any configured directory, finds its instances, and
//! removes nothing that they use.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::process::Kid;
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Home, Outcome, Trouble, Warden, wait_until};

/// A directory with foreign files, some under names that llama-warden uses.
struct Foreign {
    files: BTreeMap<PathBuf, String>,
}

impl Foreign {
    fn make(root: &Path) -> Result<Self, Trouble> {
        let names = [
            "keep",
            "admin.sock",
            "lock",
            "notes/today.txt",
            "work/thesis.tex",
            "work/0123456789abcdef/src/main.c",
            "tools/hammer",
            "builds/my notes/plan.txt",
            "builds/0123456789abcdef/keep",
            "builds/.incoming-0123456789abcdef/keep",
            "git/project.git/HEAD",
            "git/project.new/HEAD",
            "llama-warden-1/keep",
            "llama-warden-1/lock",
            "instances/1.json",
            "llama-warden-instances/1.json",
            "locks/front-door",
            "logs/diary.log",
            "series/lock",
            "series/marks.jsonl",
            "series/mine.series",
            "sources/mine.c",
            "traces/mine.jsonl",
        ];
        let mut files = BTreeMap::new();
        for name in names {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().unwrap_or(root))?;
            std::fs::write(&path, format!("mine: {name}"))?;
            files.insert(path, format!("mine: {name}"));
        }
        Ok(Self { files })
    }

    fn check(&self, after: &str) -> Outcome {
        for (path, content) in &self.files {
            let found = std::fs::read_to_string(path).ok();
            if found.as_deref() != Some(content) {
                return Err(Trouble::new(format!("after {after}: {} is {found:?}", path.display())));
            }
        }
        Ok(())
    }
}

const DIRECTORIES: [(&str, &str); 4] = [
    ("paths.runtime_dir", "sockets"),
    ("paths.state_dir", "rest"),
    ("paths.data_dir", "rest"),
    ("paths.cache_dir", "rest"),
];

#[tokio::test]
async fn what_others_keep_in_a_configured_directory_stays_whatever_ends_us() -> Outcome {
    let setup = Setup::new()?;
    let mut foreign = Foreign::make(&setup.home.path().join("rest"))?;
    foreign.files.extend(Foreign::make(&setup.home.path().join("sockets"))?.files);
    let home = setup.home.path().display().to_string();
    let top: String =
        DIRECTORIES.iter().flat_map(|(key, folder)| [key, " = '", &home, "/", folder, "'\n"]).collect();
    let mut warden = setup.top(&top).fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    foreign.check("a start")?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    foreign.check("a clean exit")?;

    // llama-warden was killed, and starts with what that left.
    let mut warden = warden.again().await?;
    let children = warden.until_ready(1).await?;
    warden.kid.signal(Signal::KILL);
    warden.kid.exit(SOON).await?;
    Warden::until_gone(&children, SOON).await?;
    foreign.check("a kill")?;
    let mut warden = warden.again().await?;
    warden.until_ready(1).await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    foreign.check("a start over what a killed one left")?;

    // The port is taken, so the start fails after it has taken the directories.
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0))?;
    let failing = warden
        .setup
        .config()
        .replace("server.port = 0", &format!("server.port = {}", taken.local_addr()?.port()));
    let file = warden.home().file("failing.toml", failing)?;
    let ran = warden.home().warden(["serve", "--config", &file.to_string_lossy()], SOON).await?;
    assert!(ran.code != 0, "{ran:?}");
    foreign.check("a start that failed")?;

    let file = warden.home().file("warden.toml", warden.setup.config())?;
    let file = file.to_string_lossy().into_owned();
    for command in [
        &["builds", "gc", "--keep", "0"][..],
        &["builds", "gc", "--keep", "0", "--force"],
        &["builds", "rm", "0123456789abcdef"],
        &["builds", "rm", "0123456789abcdef", "--force"],
        &["builds", "list"],
        &["config", "check"],
        &["status"],
    ] {
        let mut words = command.to_vec();
        words.extend(["--config", &file]);
        let ran = warden.home().warden(words, SOON).await?;
        foreign.check(&format!("{command:?}: {ran:?}"))?;
    }
    Ok(())
}

/// Keys of the schema that name a path, such as `models.*.directory`.
async fn path_keys(home: &Home) -> Result<Vec<String>, Trouble> {
    let ran = home.warden(["config", "schema"], SOON).await?;
    let schema: Value = serde_json::from_str(&ran.stdout)?;
    let (mut keys, mut left) = (Vec::new(), vec![(String::new(), &schema)]);
    while let Some((path, schema)) = left.pop() {
        if schema["format"] == "path" {
            keys.push(path);
            continue;
        }
        let under = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        let named = schema["properties"].as_object().into_iter().flatten();
        left.extend(named.map(|(key, inner)| (under(key), inner)));
        let any = schema.get("additionalProperties").filter(|inner| inner.is_object());
        left.extend(any.map(|inner| (under("*"), inner)));
    }
    Ok(keys)
}

/// Effect of a key that names a directory.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Serves,
    /// Refused, because llama-warden reads a file there.
    Refused,
    /// Refused, because llama-warden writes a file there.
    Written,
}

/// Every new key needs an entry here.
fn fate(key: &str) -> Result<Fate, Trouble> {
    Ok(match key {
        "paths.runtime_dir" | "paths.state_dir" | "paths.data_dir" | "paths.cache_dir"
        | "models.*.directory" | "defaults.directory" => Fate::Serves,
        "server.tls_cert" | "server.tls_key" | "server.keys" | "models.*.model" | "models.*.binary"
        | "defaults.binary" | "remotes.*.key_file" | "telemetry.headers" => Fate::Refused,
        "admin.socket" | "log.access" => Fate::Written,
        other => return Err(Trouble::new(format!("what becomes of `{other}` when it names a directory?"))),
    })
}

/// A configuration in which only this key names the path.
fn with_path(setup: &Setup, key: &str, path: &Path) -> String {
    let own = key.rsplit('.').next().unwrap_or_default();
    let value = format!("'{}'", path.display());
    let mut lines: Vec<String> = setup.config().lines().map(str::to_owned).collect();
    let same =
        |line: &String| line.starts_with(&format!("{own} = ")) || line.starts_with(&format!("{key} = "));
    lines.retain(|line| !same(line));
    match (key.strip_prefix("models.*."), key.strip_prefix("remotes.*.")) {
        (Some(own), _) => lines.push(format!("{own} = {value}")),
        (_, Some(own)) => {
            lines.push(format!("[remotes.far]\nurl = \"http://127.0.0.1:1\"\n{own} = {value}"));
        }
        (None, None) => {
            lines.insert(0, format!("{key} = {value}"));
            if key == "telemetry.headers" {
                // Without an endpoint, the other keys have no effect.
                lines.insert(0, "telemetry.endpoint = \"http://127.0.0.1:1\"".to_owned());
            }
        }
    }
    lines.join("\n") + "\n"
}

/// Runs this configuration through every kind of end: stopped, killed, and started again after that.
async fn live(mut setup: Setup, config: &str, foreign: &Foreign, what: &str) -> Result<Setup, Trouble> {
    let file = setup.home.file("warden.toml", config)?;
    let args = [OsString::from("serve"), "--config".into(), file.into()];
    for killed in [false, true, false] {
        let mut warden = setup.start_with(&args).await?;
        let request = warden_rig::warden::chat("a", "m", "go", 2, false);
        let answer = warden.http.post(warden_rig::warden::CHAT, &request).await?;
        if !answer.status.is_success() {
            return Err(Trouble::new(format!("{what}: {}", answer.text())));
        }
        foreign.check(&format!("{what}: a request"))?;
        let children = warden.kid.children();
        if killed {
            warden.kid.signal(Signal::KILL);
            warden.kid.exit(SOON).await?;
            Warden::until_gone(&children, SOON).await?;
            foreign.check(&format!("{what}: a kill"))?;
        } else {
            assert_eq!(warden.terminate(SOON).await?, 0, "{what}: {}", warden.kid.output());
            foreign.check(&format!("{what}: a clean exit"))?;
        }
        setup = warden.setup;
    }
    Ok(setup)
}

/// Runs the commands that remove files, and a start that fails after it has taken its directories.
async fn remove(home: &Home, config: &str, foreign: &Foreign, what: &str) -> Outcome {
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0))?;
    let port = format!("server.port = {}", taken.local_addr()?.port());
    let failing = home.file("failing.toml", config.replace("server.port = 0", &port))?;
    let ran = home.warden(["serve", "--config", &failing.to_string_lossy()], SOON).await?;
    assert!(ran.code != 0, "{what}: {ran:?}");
    foreign.check(&format!("{what}: a start that failed: {ran:?}"))?;
    let file = home.file("warden.toml", config)?.to_string_lossy().into_owned();
    for words in [["gc", "--keep", "0", "--force"].as_slice(), &["rm", "0123456789abcdef", "--force"]] {
        let ending = ["--config", file.as_str()];
        let words = ["builds"].iter().chain(words).chain(&ending);
        let ran = home.warden(words, SOON).await?;
        foreign.check(&format!("{what}: builds: {ran:?}"))?;
    }
    Ok(())
}

#[tokio::test]
async fn whichever_path_of_the_configuration_names_somebodys_directory_it_is_as_it_was_afterwards() -> Outcome
{
    let mut setup = Setup::new()?.fake("m", &json!({}), "")?;
    let keys = path_keys(&setup.home).await?;
    assert!(keys.len() >= 15 && keys.iter().any(|key| key == "paths.runtime_dir"), "{keys:?}");
    for (number, key) in keys.iter().enumerate() {
        let directory = setup.home.path().join(format!("d{number}"));
        let foreign = Foreign::make(&directory)?;
        let config = with_path(&setup, key, &directory);
        if fate(key)? == Fate::Serves {
            setup = live(setup, &config, &foreign, key).await?;
        } else {
            let file = setup.home.file("warden.toml", &config)?;
            let ran = setup.home.warden(["serve", "--config", &file.to_string_lossy()], SOON).await?;
            assert!(ran.code != 0 && ran.stderr.contains("error:"), "{key}: {ran:?}");
            foreign.check(&format!("{key}: {ran:?}"))?;
        }
        remove(&setup.home, &config, &foreign, key).await?;
        if fate(key)? == Fate::Written {
            let config = with_path(&setup, key, &directory.join("ours"));
            setup = live(setup, &config, &foreign, key).await?;
            remove(&setup.home, &config, &foreign, key).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn whichever_variable_names_somebodys_directory_it_is_as_it_was_afterwards() -> Outcome {
    // Variables that name a directory, or a file in one.
    for (name, file) in [
        ("HOME", ""),
        ("XDG_STATE_HOME", ""),
        ("XDG_DATA_HOME", ""),
        ("XDG_CACHE_HOME", ""),
        ("XDG_RUNTIME_DIR", ""),
        ("TMPDIR", ""),
        ("LLAMA_WARDEN_REPORT", ""),
        ("LLAMA_WARDEN_REPORT", "keep"),
        ("LLAMA_WARDEN_REPORT", "ours"),
    ] {
        let mut setup = Setup::new()?;
        let directory = setup.home.path().join("d");
        let mut foreign = Foreign::make(&directory)?;
        let path = directory.join(file);
        let of_model = name == "LLAMA_WARDEN_REPORT";
        if of_model {
            // llama-server writes this report on the user's request.
            foreign.files.remove(&path);
        } else {
            if name == "HOME" {
                for variable in ["XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"] {
                    setup.home.env.remove(OsStr::new(variable));
                }
            }
            setup.home.env.insert(name.into(), path.clone().into());
        }
        let setup = setup.fake("m", &json!({}), "")?;
        let more = if of_model {
            format!("env = {{ {name} = '{}', ", path.display())
        } else {
            "env = { ".to_owned()
        };
        let config = setup.config().replace("env = { ", &more);
        let setup = live(setup, &config, &foreign, name).await?;
        remove(&setup.home, &config, &foreign, name).await?;
        assert!(file.is_empty() || path.is_file(), "{name}: {} is gone", path.display());
    }
    Ok(())
}

#[tokio::test]
async fn a_file_where_a_socket_is_to_be_stays_and_is_named() -> Outcome {
    let setup = Setup::new()?.fake("m", &json!({}), "")?;
    let mine = setup.home.file("admin.sock", "my notes")?;
    let file = setup.home.file("warden.toml", setup.config())?;
    let ran = setup.home.warden(["serve", "--config", &file.to_string_lossy()], SOON).await?;
    assert!(ran.code != 0 && ran.stderr.contains("admin.sock"), "{ran:?}");
    assert_eq!(std::fs::read_to_string(mine)?, "my notes");
    Ok(())
}

#[tokio::test]
async fn a_running_instance_is_found_wherever_it_keeps_its_state() -> Outcome {
    let setup = Setup::new()?;
    let state = setup.home.path().join("elsewhere");
    let top = format!("paths.state_dir = '{}'", state.display());
    let warden = setup.top(&top).fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    let ran = warden.cli(&["status"]).await?;
    assert!(ran.code == 0 && ran.stdout.contains("loaded"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn two_signals_at_once_are_one() -> Outcome {
    let mut warden = Setup::new()?.fake("m", &json!({"ms_per_token": 10}), "")?.start().await?;
    warden.until_ready(1).await?;
    let request = warden_rig::warden::chat("a", "m", "go", 100, true);
    let mut flow = warden.http.stream(warden_rig::warden::CHAT, &request).await?;
    flow.event().await?;
    // GNU timeout signals the process, and then its group.
    warden.kid.signal(Signal::TERM);
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    warden.kid.signal(Signal::TERM);
    let (answer, end) = flow.rest().await;
    assert!(answer.done && end.is_ok(), "{answer:?} {end:?}");
    assert_eq!(warden.kid.exit(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn a_hangup_sent_to_everything_ends_no_llama_server() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    let children = warden.until_ready(1).await?;
    // `systemctl kill -s HUP` signals each process of the unit.
    children[0].signal(Signal::HUP);
    let answer = warden
        .http
        .post(warden_rig::warden::CHAT, &warden_rig::warden::chat("a", "m", "go", 5, false))
        .await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    assert_eq!(warden.backends(), children);
    Ok(())
}

/// Starts llama-warden in the foreground of a terminal that `script` makes, and that ends with `script`.
async fn in_a_terminal(setup: &Setup, args: &[&str]) -> Result<Kid, Trouble> {
    let program = warden_rig::binaries::llama_warden()?;
    // With `nohup` the tests would inherit an ignored HUP.
    let line = format!("exec env --default-signal=HUP '{}' {}", program.display(), args.join(" "));
    let copy = setup.home.path().join("typescript");
    let words = ["-q", "-f", "-c", &line, &copy.to_string_lossy()].map(Into::into);
    let log = setup.home.path().join("terminal.log");
    let mut kid = Kid::start(Path::new("/usr/bin/script"), &words, &setup.home.env, setup.home.path(), log)?;
    kid.says("listening on http", SOON).await?;
    Ok(kid)
}

#[tokio::test]
async fn the_end_of_its_terminal_ends_it_and_a_hangup_from_elsewhere_does_not() -> Outcome {
    let setup = Setup::new()?.fake("m", &json!({}), "")?;
    let file = setup.home.file("warden.toml", setup.config())?;
    let mut kid = in_a_terminal(&setup, &["serve", "--config", &file.to_string_lossy()]).await?;
    let inner = kid.children().first().copied().ok_or_else(|| Trouble::new("there is no child"))?;
    let children = || warden_rig::process::children_of(inner.pid);
    wait_until("its child runs", SOON, async || !children().is_empty()).await?;
    // With a terminal, HUP means reload.
    setup.home.file("warden.toml", setup.config().replace("preload = true", "preloaded = true"))?;
    inner.signal(Signal::HUP);
    kid.says("preloaded", SOON).await?;
    assert!(inner.is_alive());
    let servers = children();
    kid.signal(Signal::KILL);
    wait_until("it ends with its terminal", SOON, async || !inner.is_alive()).await?;
    Warden::until_gone(&servers, SOON).await
}

#[tokio::test]
async fn an_access_log_that_cannot_be_written_is_told_once_and_counted() -> Outcome {
    let mut warden = Setup::new()?.top("log.access = '/dev/full'").fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    for n in 0..5 {
        let request = warden_rig::warden::chat(&format!("r-{n}"), "m", "go", 2, false);
        assert!(warden.http.post(warden_rig::warden::CHAT, &request).await?.status.is_success());
    }
    warden.says("the access log /dev/full cannot be written").await?;
    wait_until("all lost lines are counted", SOON, async || {
        let lost = warden.metric("llama_warden_access_log_lost_lines_total").await;
        lost.is_ok_and(|lost| lost.is_some_and(|lost| lost >= 5.0))
    })
    .await?;
    assert_eq!(warden.kid.output().matches("cannot be written").count(), 1, "{}", warden.kid.output());
    let ran = warden.cli(&["status"]).await?;
    assert!(ran.stdout.contains("/dev/full"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn without_home_nothing_goes_into_the_root_directory() -> Outcome {
    let mut home = Home::new()?;
    for name in ["HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"] {
        home.env.remove(OsStr::new(name));
    }
    let ran = home.warden(["config", "show"], SOON).await?;
    assert!(!ran.stdout.contains("\"/."), "{ran:?}");
    Ok(())
}

/// Writes a fake-llama with the provenance of a `build` into a store.
fn put_build(home: &Home, id: &str, built_at: &str) -> Result<PathBuf, Trouble> {
    let folder = home.path().join("data/llama-warden/builds").join(id);
    std::fs::create_dir_all(&folder)?;
    let binary = folder.join("llama-server");
    std::fs::copy(warden_rig::binaries::fake_llama()?, &binary)?;
    let tool = json!({"path": "/usr/bin/true", "version": "1"});
    let provenance = json!({
        "schema": 1, "id": id, "built_at": built_at,
        "plan": {
            "id": id,
            "recipe": {"schema": 1, "source": "x", "root": "", "patch_set": "none", "backend": "cpu", "arch": "native",
                "cmake": [], "c": "c", "cxx": "c", "target": "t", "cpu": "c"},
            "source": {"given": "/src", "kind": "folder", "identity": "x", "root": "", "server": "tools/server",
                "revision": {"commit": null, "build_number": null}},
            "compilers": {"c": tool, "cxx": tool, "target": "t", "cpu": "c"},
        },
        "drivers": {"cmake": tool, "ninja": tool, "launcher": null},
        "timings": {"unpack": 0.0, "configure": 0.0, "compile": 0.0, "verify": 0.0},
        "binary": {"size": std::fs::metadata(&binary)?.len(), "sha256": ""},
        "verified": {"checks": []},
        "host": {"name": "", "kernel": "", "machine": "", "cpu": ""},
    });
    std::fs::write(folder.join("provenance.json"), provenance.to_string())?;
    Ok(binary)
}

#[tokio::test]
async fn a_build_that_a_running_instance_needs_is_not_removed_without_force() -> Outcome {
    let ids = ["aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc"];
    let setup = Setup::new()?;
    let old = put_build(&setup.home, ids[0], "2026-01-01T00:00:00Z")?;
    put_build(&setup.home, ids[1], "2026-02-01T00:00:00Z")?;
    put_build(&setup.home, ids[2], "2026-03-01T00:00:00Z")?;
    let left = setup.home.file("data/llama-warden/builds/.incoming-dddddddddddddddd/llama-server", "half")?;
    // The instance keeps its state elsewhere, but `gc` must still learn which builds it needs.
    let top = format!("paths.state_dir = '{}'", setup.home.path().join("elsewhere").display());
    let toml = format!(
        "binary = '{}'\nmodel = '{}'\npreload = true\n",
        old.display(),
        setup.home.path().join("model.gguf").display()
    );
    let mut warden = setup.top(&top).model("m", &toml).start().await?;
    warden.until_ready(1).await?;

    let mut pages = String::new();
    let home = warden.home().path().to_owned();
    let mut told = |ran: &warden_rig::home::Ran| {
        let page = crate::pages::page(&home, ran);
        pages.push_str(&(crate::pages::without_figures(&page) + "\n"));
    };
    let ran = warden.cli(&["builds", "show", "aaaa"]).await?;
    let shown: Value = serde_json::from_str(&ran.stdout)?;
    assert!(shown["id"] == ids[0] && shown["built_at"] == "2026-01-01T00:00:00Z", "{ran:?}");
    let ran = warden.cli(&["builds", "rm", "aaaa"]).await?;
    told(&ran);
    assert!(ran.code == 1 && ran.stderr.contains("`m`") && old.exists(), "{ran:?}");
    let ran = warden.cli(&["builds", "gc", "--keep", "1", "--dry-run"]).await?;
    told(&ran);
    assert!(
        ran.code == 0 && ran.stdout.contains("would remove bbbb") && ran.stdout.contains("free"),
        "{ran:?}"
    );
    assert!(ran.stdout.contains("keeps aaaa") && left.exists(), "{ran:?}");
    let ran = warden.cli(&["builds", "gc", "--keep", "1"]).await?;
    told(&ran);
    assert!(ran.code == 0 && ran.stdout.contains("freed"), "{ran:?}");
    let builds = warden.home().path().join("data/llama-warden/builds");
    let there = |id: &str| builds.join(id).exists();
    assert!(there(ids[0]) && !there(ids[1]) && there(ids[2]) && !left.exists(), "{ran:?}");
    assert_eq!(warden.cli(&["restart", "m"]).await?.code, 0, "its build is there");

    assert_eq!(warden.terminate(SOON).await?, 0);
    let ran = warden.cli(&["builds", "gc", "--keep", "0"]).await?;
    told(&ran);
    assert!(
        ran.code == 1 && ran.stdout.contains("would remove") && ran.stderr.contains("--force"),
        "{ran:?}"
    );
    assert!(there(ids[0]) && there(ids[2]), "{ran:?}");
    let ran = warden.cli(&["builds", "gc", "--keep", "0", "--force"]).await?;
    told(&ran);
    assert!(ran.code == 0 && !there(ids[0]) && !there(ids[2]), "{ran:?}");
    told(&warden.cli(&["builds", "gc"]).await?);
    insta::assert_snapshot!(pages);
    Ok(())
}

#[tokio::test]
async fn history_tells_of_instances_that_have_ended() -> Outcome {
    let mut warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    assert_eq!(warden.cli(&["restart", "m"]).await?.code, 0);
    assert_eq!(warden.terminate(SOON).await?, 0);
    let ran = warden.cli(&["history"]).await?;
    assert!(ran.code == 0 && ran.stdout.contains("ready after"), "{ran:?}");
    let ran =
        warden.cli(&["history", "--model", "m", "--reason", "operator", "--since", "1h", "--json"]).await?;
    let lines: Vec<Value> = ran.stdout.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    assert!(lines.iter().any(|line| line["kind"] == "recycle_done"), "{ran:?}");
    assert!(lines.iter().all(|line| line["model"] == "m"), "{ran:?}");
    let ran = warden.cli(&["history", "--model", "other"]).await?;
    assert!(ran.code == 0 && ran.stdout.contains("nothing"), "{ran:?}");
    Ok(())
}
