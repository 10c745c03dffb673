//! The archive for a bug report, with and without a running instance, never contains a secret.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde_json::json;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Home, Outcome, Trouble};

const TOKEN: &str = "hf_abcdefghijklmnopqrstuvwxyzABCD1234";
/// Secrets that do not look like secrets.
const PLAIN: &str = "correct-horse-battery-staple";
const VARIABLE: &str = "tr0ub4dor-and-3";

/// Files of an archive, by their path in its folder.
fn unpacked(path: &Path) -> Result<BTreeMap<String, String>, Trouble> {
    let file = std::fs::File::open(path)?;
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
    let mut all = BTreeMap::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.to_string_lossy().into_owned();
        let mut text = String::new();
        entry.read_to_string(&mut text)?;
        let name = name.strip_prefix("llama-warden-report/").context(&name)?.to_owned();
        all.insert(name, text);
    }
    Ok(all)
}

fn archives(folder: &Path) -> Result<Vec<PathBuf>, Trouble> {
    let paths = std::fs::read_dir(folder)?.filter_map(Result::ok).map(|entry| entry.path());
    Ok(paths.filter(|path| path.to_string_lossy().ends_with(".tar.gz")).collect())
}

fn no_secret(what: &str, text: &str) {
    for secret in [TOKEN, PLAIN, VARIABLE, "open-sesame", "me:pw"] {
        assert!(!text.contains(secret), "{secret} is in {what}:\n{text}");
    }
}

#[tokio::test]
async fn a_report_of_a_running_instance_has_all_of_it_and_no_secret() -> Outcome {
    let says = json!({ "stderr": [
        format!("token {TOKEN}"), format!("the flag was {PLAIN}"), format!("the variable was {VARIABLE}"),
        "fetching https://me:pw@host/model.gguf?sig=open-sesame",
    ]});
    let setup = Setup::new()?.fake("org/m", &says, "record = true\n")?;
    let config = setup.config().replace("env = {", &format!("env = {{ A_TOKEN = \"{VARIABLE}\","));
    let config = config.replace("args = [", &format!("args = [\"--hf-token\", \"{PLAIN}\", "));
    let file = setup.home.file("warden.toml", config)?;
    let mut warden = setup.start_with(&["serve".into(), "--config".into(), file.into()]).await?;
    warden.until_ready(1).await?;
    assert!(
        warden
            .http
            .post(CHAT, &chat("a", "org/m", "a private question", 2, false))
            .await?
            .status
            .is_success()
    );
    assert_eq!(warden.cli(&["restart", "org/m"]).await?.code, 0);
    let config = ["--config", "warden.toml"];

    // Without a terminal to confirm on, the command writes nothing and lists the content.
    let home = warden.home().path().to_owned();
    let ran = warden.cli(&[&["report"], &config[..]].concat()).await?;
    assert!(ran.code == 2 && ran.stderr.contains("--yes") && ran.stderr.contains("--list"), "{ran:?}");
    let listed = warden.cli(&[&["report", "--list"], &config[..]].concat()).await?;
    assert!(listed.code == 0 && listed.stdout.contains("nothing was written"), "{listed:?}");
    assert_eq!(archives(&home)?, Vec::<PathBuf>::new());

    let write = [&["report", "--yes", "--out", "r.tar.gz"], &config[..]].concat();
    let ran = warden.cli(&write).await?;
    assert!(ran.code == 0 && ran.stderr.contains("status.json"), "{ran:?}");
    no_secret("the output", &ran.all());
    let all = unpacked(&home.join("r.tar.gz"))?;
    for (name, text) in &all {
        no_secret(name, text);
        assert!(!text.contains("private question"), "{name} has a text: {text}");
        assert!(listed.stdout.contains(name.as_str()), "{name} was not listed: {listed:?}");
    }
    for (name, part) in [
        ("config.toml", "[models.\"org/m\"]"),
        ("status.json", "\"instance\""),
        ("status.txt", "org/m"),
        ("command.txt", "serve --config"),
        ("ledger.jsonl", "operator"),
        ("events.jsonl", "org/m"),
        ("logs/01-org-m.jsonl", "the flag was ***"),
        ("metrics.txt", "llama_warden_"),
        ("machine.txt", "kernel"),
        ("recordings/org-m-g1.jsonl", "\"work\""),
        ("contents.txt", "status.json"),
    ] {
        let text = all.get(name).context(format!("{name} of {:?}", all.keys()))?;
        assert!(
            text.contains(part) || name == "machine.txt" || name.starts_with("recordings"),
            "{part} in {name}: {text}"
        );
    }

    // A second archive does not overwrite the first.
    let before = std::fs::read(home.join("r.tar.gz"))?;
    let again = warden.cli(&write).await?;
    assert!(again.code == 1 && again.stderr.contains("is there already"), "{again:?}");
    assert_eq!(std::fs::read(home.join("r.tar.gz"))?, before);

    // Without an instance, the archive has what the instance left.
    assert_eq!(warden.terminate(SOON).await?, 0);
    let ran = warden.cli(&[&["report", "--yes", "--out", "off.tar.gz"], &config[..]].concat()).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let all = unpacked(&home.join("off.tar.gz"))?;
    for (name, text) in &all {
        no_secret(name, text);
    }
    assert!(all["ledger.jsonl"].contains("operator") && !all.contains_key("status.json"), "{:?}", all.keys());
    assert!(all["notes.txt"].contains("status, logs: "), "{}", all["notes.txt"]);
    Ok(())
}

#[tokio::test]
async fn a_report_is_made_of_a_machine_with_nothing_and_of_a_configuration_that_cannot_be_read() -> Outcome {
    let home = Home::new()?;
    home.file("warden.toml", format!("[defaults.env]\nHF_TOKEN = \"{TOKEN}\nserver.port = nonsense"))?;
    let ran = home.warden(["report", "--yes", "--config", "warden.toml"], SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let made = archives(home.path())?;
    assert_eq!(made.len(), 1, "{made:?}");
    let all = unpacked(&made[0])?;
    for (name, text) in &all {
        no_secret(name, text);
    }
    assert!(all["notes.txt"].contains("config.toml: it cannot be read") && all.contains_key("machine.txt"));
    Ok(())
}

#[tokio::test]
async fn a_report_is_made_beside_an_instance_that_does_not_answer() -> Outcome {
    let setup = Setup::new()?.fake("m", &json!({}), "")?;
    let mut warden = setup.start().await?;
    warden.until_ready(1).await?;
    // A stopped process accepts connections and never answers.
    warden.kid.signal(rustix::process::Signal::STOP);
    let ran =
        warden.home().warden(["report", "--yes", "--config", "warden.toml", "--out", "r.tar.gz"], SOON).await;
    warden.kid.signal(rustix::process::Signal::CONT);
    let ran = ran?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let all = unpacked(&warden.home().path().join("r.tar.gz"))?;
    assert!(all["notes.txt"].contains("no answer within"), "{}", all["notes.txt"]);
    warden.until_ready(1).await.map(drop)
}
