//! An interrupted build of a search leaves no process, and a full disk is not blamed on a commit.

use super::*;

use warden_rig::process::ProcessId;
use warden_rig::wait::wait_for;
use warden_rig::wait_until;

/// Makes every commit run this script while it is configured, with its number and its source folder. If the
/// script fails, configuring fails with this error.
fn runs(script: &Path, error: &str) -> String {
    format!(
        "execute_process(COMMAND sh {} ${{number}} ${{CMAKE_SOURCE_DIR}} RESULT_VARIABLE failed)\n\
         if(failed)\n  message(FATAL_ERROR \"{error}\")\nendif()\n",
        script.display()
    )
}

/// A script that records commit, process and folder in a file of `begun`, then waits at most a minute until
/// `holds`.
fn script(setup: &Setup, holds: &str) -> Result<PathBuf, Trouble> {
    let folder = setup.home.path();
    std::fs::create_dir_all(folder.join("begun"))?;
    let text = format!(
        "cd '{}' || exit 2\nnumber=$1\necho \"$$ $2\" >> \".$number\"\ncp \".$number\" \".$number.$$\"\nmv \".$number.$$\" \"begun/$number\"\n\
         left=1200\nuntil {holds}; do\n  left=$((left - 1))\n  [ $left -gt 0 ] || exit 1\n  sleep 0.05\ndone\n",
        folder.display()
    );
    setup.home.file("each.sh", text)
}

/// Arguments of a search over these commits, each of which waits for `holds` and may fail with this error.
fn search(
    setup: &Setup,
    config: &Path,
    holds: &str,
    error: &str,
    planted: &[&str],
) -> Result<Vec<OsString>, Trouble> {
    let script = script(setup, holds)?;
    let history = History::configured(setup.home.path().join("history"), &runs(&script, error), planted)?;
    let range = format!("b9000..b900{}", planted.len() - 1);
    Ok(plain_arguments(config, &history, &range, &["--for", "answers"]))
}

/// Numbers of the configured commits, and how often each was configured.
fn configured(setup: &Setup) -> Vec<(usize, usize)> {
    let entries = std::fs::read_dir(setup.home.path().join("begun")).into_iter().flatten().flatten();
    let count = |entry: std::fs::DirEntry| {
        let number = entry.file_name().to_string_lossy().parse().ok()?;
        Some((number, std::fs::read_to_string(entry.path()).ok()?.lines().count()))
    };
    let mut all: Vec<(usize, usize)> = entries.filter_map(count).collect();
    all.sort_unstable();
    all
}

#[tokio::test]
async fn a_machine_without_room_ends_it_and_the_same_command_goes_on() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    // The disk is full during the first build of the middle commit.
    let holds = "{ [ $number = 1 ] && [ $(wc -l < .1) -lt 2 ] && exit 1; true; }";
    let other = sets("TOKEN_BYTES", "24");
    let args = search(&setup, &config, holds, "No space left on device", &["", "", &other])?;
    let ran = setup.home.warden(&args, LONG).await?;
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(ran.stderr.contains("disk or memory ran out") && ran.stdout.is_empty(), "{}", ran.all());
    let ran = setup.home.warden(args, LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stderr.contains("between: continues where it was, "), "{}", ran.all());
    assert!(ran.stdout.starts_with("between: b9002 ("), "{}", ran.all());
    assert_eq!(configured(&setup), [(0, 1), (1, 2), (2, 1)]);
    assert_eq!(builds(&setup), 2, "those that matter");
    Ok(())
}

#[tokio::test]
async fn an_end_that_cannot_be_built_ends_it() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    let history = History::new(setup.home.path().join("history"), &["    this is no C;", "", ""])?;
    let args = plain_arguments(&config, &history, "b9000..b9002", &["--for", "answers"]);
    let ran = setup.home.warden(args, LONG).await?;
    assert_eq!(ran.code, 1, "{}", ran.all());
    let told = "between: the older end cannot be judged: compiling failed:";
    assert!(ran.stdout.starts_with(told), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn an_interrupt_ends_the_build_that_runs_and_the_same_command_goes_on() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    let other = sets("TOKEN_BYTES", "24");
    let args = search(&setup, &config, "[ -e go ]", "it waited in vain", &["", "", &other])?;
    let log = setup.home.path().join("first.log");
    let mut kid = Kid::start(&binaries::llama_warden()?, &args, &setup.home.env, setup.home.path(), log)?;
    let file = setup.home.path().join("begun/2");
    let told = wait_for("a build begins", LONG, async || std::fs::read_to_string(&file).ok()).await?;
    let (pid, source) = told.trim().split_once(' ').context("a process and a folder")?;
    let (process, source) = (ProcessId::of(pid.parse()?).context("it waits")?, PathBuf::from(source));
    assert!(process.is_alive() && source.exists(), "{told}");
    kid.signal(Signal::INT);
    let code = kid.exit(SOON).await?;
    assert_eq!(code, 130, "{}", kid.output());
    wait_until("the build is gone", SOON, async || !process.is_alive()).await?;
    assert!(!source.exists() && source.parent().is_none_or(|work| !work.exists()), "{}", source.display());
    assert_eq!(builds(&setup), 0);
    std::fs::write(setup.home.path().join("go"), "")?;
    let ran = setup.home.warden(args, LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stdout.starts_with("between: b9002 ("), "{}", ran.all());
    assert_eq!(configured(&setup), [(0, 1), (1, 1), (2, 2)]);
    Ok(())
}
