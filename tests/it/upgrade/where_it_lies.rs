//! The default program of an upgrade, and the report on it.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::json;
use warden_rig::warden::Setup;
use warden_rig::{Context as _, Outcome, Trouble, binaries};

use super::until_alone;

/// Copies the program into a folder of its own.
fn copy(home: &Path, folder: &str) -> Result<PathBuf, Trouble> {
    let folder = home.join(folder);
    std::fs::create_dir_all(&folder)?;
    let path = folder.join("llama-warden");
    std::fs::copy(binaries::llama_warden()?, &path)?;
    Ok(path)
}

#[tokio::test]
async fn a_link_that_leads_to_the_next_version_is_followed_and_what_a_restart_would_start_is_told() -> Outcome
{
    let setup = Setup::new()?.fake("m", &json!({}), "")?;
    let home = setup.home.path().to_owned();
    let (first, second) = (copy(&home, "1")?, copy(&home, "2")?);
    let current = home.join("current");
    symlink("1", &current)?;
    let config = setup.home.file("warden.toml", setup.config())?;
    let words = ["serve".into(), "--config".into(), config.into()];
    let warden = setup.start_program(&current.join("llama-warden"), &words).await?;
    let before = warden.until_ready(1).await?;
    let serves = async || {
        let serving = until_alone(&warden).await?;
        std::fs::read_link(format!("/proc/{}/exe", serving.pid)).context("its program")
    };

    let ran = warden.cli(&["upgrade"]).await?;
    let same = format!("it is the same program as before, {}", first.display());
    assert!(ran.code == 0 && ran.stdout.contains(&same) && !ran.stdout.contains("restart"), "{ran:?}");
    assert_eq!(serves().await?, first);

    std::fs::remove_file(&current)?;
    symlink("2", &current)?;
    let ran = warden.cli(&["upgrade"]).await?;
    assert!(ran.code == 0 && !ran.stdout.contains("note:"), "{ran:?}");
    assert_eq!(serves().await?, second);

    let ran = warden.cli(&["upgrade", "--to", &first.to_string_lossy()]).await?;
    let other = format!("a restart would start {}", current.join("llama-warden").display());
    assert!(ran.code == 0 && ran.stdout.contains(&other), "{ran:?}");
    assert_eq!(serves().await?, first);
    // The path of the program counts, not the target of the link.
    let ran = warden.cli(&["upgrade"]).await?;
    assert!(ran.code == 0 && ran.stdout.contains(&same) && ran.stdout.contains(&other), "{ran:?}");
    assert_eq!((serves().await?, warden.until_ready(1).await?), (first, before));
    Ok(())
}
