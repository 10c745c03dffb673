//! Several revisions are built at a time: that is really so, one of them that fails changes nothing, and none is left after an interrupt.

use super::*;

use warden_rig::process::ProcessId;
use warden_rig::wait::wait_for;
use warden_rig::wait_until;

/// Runs a script for each commit that is configured, with its number and its source folder. If that fails, this is the error.
fn runs(script: &Path, error: &str) -> String {
    format!(
        "execute_process(COMMAND sh {} ${{number}} ${{CMAKE_SOURCE_DIR}} RESULT_VARIABLE failed)\n\
         if(failed)\n  message(FATAL_ERROR \"{error}\")\nendif()\n",
        script.display()
    )
}

/// A script that notes the commit, its process and its folder in a file of `begun`, and then waits for at most a minute until `holds`.
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

/// The arguments of a search over these commits, two of which are built at a time. Each waits for `holds` when it is configured; what goes
/// wrong there is this error.
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
    Ok(plain_arguments(config, &history, &range, &["--for", "answers", "--builds", "2"]))
}

/// Begins it, to be ended before its time.
fn begin(setup: &Setup, args: &[OsString]) -> Result<Kid, Trouble> {
    let log = setup.home.path().join("first.log");
    Kid::start(&binaries::llama_warden()?, args, &setup.home.env, setup.home.path(), log)
}

/// The commits that were configured, by number, and how often each was.
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

/// The file of the only search.
fn kept(setup: &Setup) -> Option<PathBuf> {
    let folder = setup.home.path().join("state/llama-warden/between");
    std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).next()
}

#[tokio::test]
async fn both_ends_are_built_at_the_same_time_and_each_line_says_of_which_it_is() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    // The first one waits for the second: one after the other would not end well.
    let other = sets("TOKEN_BYTES", "24");
    let args =
        search(&setup, &config, "[ $(ls begun | wc -l) -ge 2 ]", "it waited in vain", &["", "", &other])?;
    let ran = setup.home.warden(args, LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stdout.starts_with("between: b9002 ("), "{}", ran.all());
    let told = ran.stderr.lines().find(|line| line.contains(" at a time, with ")).context(ran.all())?;
    assert!(
        told.starts_with("between: 2 builds at a time, with ") && told.ends_with(": b9002, b9000"),
        "{told}"
    );
    for line in
        ["  b9000: compiling", "  b9002: compiling", "  b9000: build ", "  b9002: build ", "  compiling"]
    {
        assert!(ran.stderr.contains(line), "{line}: {}", ran.all());
    }
    assert!(!ran.stderr.contains("b9001: "), "that one is alone: {}", ran.all());
    assert_eq!(configured(&setup), [(0, 1), (1, 1), (2, 1)]);
    Ok(())
}

#[tokio::test]
async fn a_build_that_nobody_asked_for_may_fail_and_is_not_made_twice() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (other, broken) = (sets("TOKEN_BYTES", "24"), "    this is no C;");
    let (late, early) =
        (["", "", "", "", broken, "", &other], ["", "", &other, &other, broken, &other, &other]);
    for (planted, found, made) in [(late, 6, &[0, 3, 4, 5, 6][..]), (early, 2, &[0, 1, 2, 3, 4, 6])] {
        let (setup, config) = setup()?;
        let args = search(&setup, &config, "true", "it waited in vain", &planted)?;
        let ran = setup.home.warden(args, LONG).await?;
        assert_eq!(ran.code, 0, "{}", ran.all());
        assert!(ran.stdout.starts_with(&format!("between: b900{found} (")), "{}", ran.all());
        assert!(ran.stderr.contains(": b9003; in case it is asked for next: b9004"), "{}", ran.all());
        assert!(ran.stderr.contains("b9004: not built: compiling failed: "), "{}", ran.all());
        // The table has it only where the search asked for it.
        let row = ran.stdout.lines().find(|line| line.starts_with("b9004"));
        assert_eq!(row.is_some_and(|row| row.contains("not known: ")), found == 6, "{}", ran.all());
        assert_eq!(row.is_some(), found == 6, "{}", ran.all());
        let once: Vec<(usize, usize)> = made.iter().map(|number| (*number, 1)).collect();
        assert_eq!(configured(&setup), once, "{}", ran.all());
        assert_eq!(builds(&setup), 2, "what was built ahead goes, too");
    }
    Ok(())
}

#[tokio::test]
async fn what_has_no_room_beside_another_build_is_made_alone() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    // The disk is full when the newer end is built for the first time. The other one would never end by itself the first time.
    let first = "[ $number = 2 ] && [ -e begun/0 ] && exit 1";
    let other = sets("TOKEN_BYTES", "24");
    let args = search(
        &setup,
        &config,
        &format!("[ $number = 1 ] || [ $(wc -l < .$number) -ge 2 ] || {{ {first}; false; }}"),
        "No space left on device",
        &["", "", &other],
    )?;
    let ran = setup.home.warden(args, LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stdout.starts_with("between: b9002 ("), "{}", ran.all());
    for line in ["between: b9002 had no room: ", "b9000: not built: it is not needed now"] {
        assert!(ran.stderr.contains(line), "{line}: {}", ran.all());
    }
    assert_eq!(ran.stderr.matches(" at a time, with ").count(), 1, "{}", ran.all());
    assert_eq!(configured(&setup), [(0, 2), (1, 1), (2, 2)]);
    Ok(())
}

#[tokio::test]
async fn what_fails_its_checks_beside_another_build_is_made_alone() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    // The newer end starts once it was configured for the second time.
    let once = format!(
        "    if (access(\"{}\", F_OK) != 0) {{ return 1; }}\n{}",
        setup.home.path().join("again").display(),
        sets("TOKEN_BYTES", "24")
    );
    let args = search(
        &setup,
        &config,
        "{ [ $number = 2 ] && [ $(wc -l < .2) -ge 2 ] && : > again; true; }",
        "it waited in vain",
        &["", "", &once],
    )?;
    let ran = setup.home.warden(args, LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stdout.starts_with("between: b9002 ("), "{}", ran.all());
    for line in
        ["between: b9002 failed its checks beside other builds", "between: b9002 passes its checks alone"]
    {
        assert!(ran.stderr.contains(line), "{line}: {}", ran.all());
    }
    let again = configured(&setup);
    assert!(again.contains(&(2, 2)), "{again:?}");
    Ok(())
}

#[tokio::test]
async fn a_build_that_hangs_and_may_not_be_needed_holds_nothing_up() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let other = sets("TOKEN_BYTES", "24");
    let planted = ["", "", &other, &other, &other, &other, &other, &other, &other];
    // Beside the fourth one, which is built, or which fails once the sixth one was begun.
    for holds in
        ["[ $number != 6 ]", "[ $number != 6 ] && { [ $number != 4 ] || { [ -e begun/6 ] && exit 1; }; }"]
    {
        let (setup, config) = setup()?;
        let args = search(&setup, &config, holds, "it waited in vain", &planted)?;
        let ran = setup.home.warden(args, LONG).await?;
        assert_eq!(ran.code, 0, "{}", ran.all());
        assert!(ran.stdout.starts_with("between: b9002 ("), "{}", ran.all());
        assert!(ran.stderr.contains(": b9004; in case it is asked for next: b9006"), "{}", ran.all());
        assert!(ran.stderr.contains("b9006: not built: it is not needed now"), "{}", ran.all());
        let fails = holds.contains("exit");
        assert_eq!(ran.stderr.contains("b9004: not built: "), fails, "{}", ran.all());
        let begun = configured(&setup);
        assert!(begun.contains(&(4, 1)) && begun.contains(&(6, 1)), "{begun:?}");
    }
    Ok(())
}

#[tokio::test]
async fn an_end_that_cannot_be_built_ends_it_before_the_other_one_is_run() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    let history = History::new(setup.home.path().join("history"), &["    this is no C;", "", ""])?;
    let args = plain_arguments(&config, &history, "b9000..b9002", &["--for", "answers", "--builds", "2"]);
    let ran = setup.home.warden(args, LONG).await?;
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(ran.stderr.contains("b9000: not built: compiling failed: "), "{}", ran.all());
    let told = "between: the older end cannot be judged: compiling failed:";
    assert!(ran.stdout.starts_with(told), "{}", ran.all());
    let kept = std::fs::read_to_string(kept(&setup).context("a file of the search")?)?;
    assert!(kept.contains("\"built\"") && !kept.contains("\"told\""), "{kept}");
    Ok(())
}

#[tokio::test]
async fn a_build_is_written_down_as_soon_as_it_is_made_and_removed_by_whoever_goes_on() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    let other = sets("TOKEN_BYTES", "24");
    let args = search(
        &setup,
        &config,
        "[ $number != 0 ] || [ -e go ]",
        "it waited in vain",
        &["", &other, &other, &other],
    )?;
    let mut kid = begin(&setup, &args)?;
    wait_until("the newer end is written down", LONG, async || {
        kept(&setup)
            .and_then(|path| std::fs::read_to_string(path).ok())
            .is_some_and(|text| text.contains("built"))
    })
    .await?;
    kid.signal(Signal::KILL);
    kid.exit(SOON).await.ok();
    std::fs::write(setup.home.path().join("go"), "")?;
    let ran = setup.home.warden(args, LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stdout.starts_with("between: b9001 ("), "{}", ran.all());
    assert_eq!(builds(&setup), 2, "those that matter");
    Ok(())
}

#[tokio::test]
async fn an_interrupt_ends_all_builds_that_run_and_the_same_command_goes_on() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    let other = sets("TOKEN_BYTES", "24");
    let args = search(&setup, &config, "[ -e go ]", "it waited in vain", &["", "", &other])?;
    let mut kid = begin(&setup, &args)?;
    let mut running: Vec<(ProcessId, PathBuf)> = Vec::new();
    for number in [0, 2] {
        let file = setup.home.path().join(format!("begun/{number}"));
        let told = wait_for("a build begins", LONG, async || std::fs::read_to_string(&file).ok()).await?;
        let (pid, source) = told.trim().split_once(' ').context("a process and a folder")?;
        running.push((ProcessId::of(pid.parse()?).context("it waits")?, PathBuf::from(source)));
    }
    assert!(running.iter().all(|(process, source)| process.is_alive() && source.exists()), "{running:?}");
    kid.signal(Signal::INT);
    let code = kid.exit(SOON).await?;
    assert_eq!(code, 130, "{}", kid.output());
    wait_until("no build is left", SOON, async || !running.iter().any(|(process, _)| process.is_alive()))
        .await?;
    for (_, source) in &running {
        assert!(
            !source.exists() && source.parent().is_none_or(|work| !work.exists()),
            "{}",
            source.display()
        );
    }
    assert_eq!(builds(&setup), 0);
    std::fs::write(setup.home.path().join("go"), "")?;
    let ran = setup.home.warden(args, LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stdout.starts_with("between: b9002 ("), "{}", ran.all());
    assert_eq!(configured(&setup), [(0, 2), (1, 1), (2, 2)]);
    Ok(())
}
