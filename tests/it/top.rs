//! `top` on a real terminal: shows the state, reacts to keys, and restores the terminal however it ends.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use warden_rig::pty::Terminal;
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Home, Outcome, Trouble, Warden, binaries, wait_until};

/// Sequences that restore the earlier screen, the cursor, and line wrap.
const GIVEN_BACK: [&str; 3] = ["\x1b[?1049l", "\x1b[?25h", "\x1b[?7h"];
/// The key that redraws the screen.
const ANEW: &str = "\x0c";

fn setup() -> Result<Setup, Trouble> {
    let mut setup = Setup::new()?.fake("m", &json!({}), "")?;
    for (name, value) in [("TERM", "xterm-256color"), ("LC_ALL", "C.UTF-8")] {
        setup.home.env.insert(name.into(), value.into());
    }
    Ok(setup)
}

async fn running() -> Result<Warden, Trouble> {
    let warden = setup()?.start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

fn top(home: &Home, args: &[&str]) -> Result<Terminal, Trouble> {
    let args = ["top", "--interval", "100ms"].iter().chain(args);
    Terminal::start(home, &binaries::llama_warden()?, args, (100, 30))
}

async fn is_given_back(terminal: &Terminal) -> Outcome {
    // The last output may still be on its way.
    wait_until("the terminal is given back", SOON, async || {
        let seen = terminal.seen();
        let end = seen.rfind("\x1b[?1049h").unwrap_or_default();
        GIVEN_BACK.iter().all(|sequence| seen[end..].contains(sequence))
    })
    .await?;
    assert!(terminal.is_cooked()?);
    Ok(())
}

#[tokio::test]
async fn top_shows_a_model_restarts_it_by_a_key_and_gives_the_terminal_back() -> Outcome {
    let warden = running().await?;
    let before = warden.backends();
    let mut terminal = top(warden.home(), &[])?;
    terminal.shows(&["MODEL", "loaded", "1 model", "llama-warden"], SOON).await?;
    assert!(!terminal.is_cooked()?);
    terminal.press("r")?;
    terminal.shows(&["restart m? y or n"], SOON).await?;
    terminal.press("y")?;
    wait_until("another process serves", SOON, async || {
        let now = warden.backends();
        now.len() == 1 && now != before
    })
    .await?;
    terminal.shows(&["restart of m: done"], SOON).await?;
    terminal.press("\r")?;
    terminal.shows(&["events, the newest first"], SOON).await?;
    terminal.resize(80, 12)?;
    wait_until("it is drawn as large as the terminal is", SOON, async || {
        let screen = terminal.screen();
        screen.contains("Esc back") && screen.lines().count() == 12
    })
    .await?;
    terminal.press("q")?;
    assert_eq!(terminal.exit(SOON).await?, 0);
    is_given_back(&terminal).await
}

#[tokio::test]
async fn top_gives_the_terminal_back_after_a_signal() -> Outcome {
    let warden = running().await?;
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let mut terminal = top(warden.home(), &[])?;
        terminal.shows(&["loaded"], SOON).await?;
        terminal.signal(signal);
        assert_eq!(terminal.exit(SOON).await?, 130, "{signal:?}");
        is_given_back(&terminal).await?;
    }
    Ok(())
}

#[tokio::test]
async fn top_lives_on_beside_an_instance_that_is_frozen_gone_and_back() -> Outcome {
    let mut warden = running().await?;
    let mut terminal = top(warden.home(), &[])?;
    terminal.shows(&["loaded"], SOON).await?;
    warden.kid.signal(Signal::STOP);
    // llama-warden does not answer, but keys still work.
    terminal.press("\r")?;
    terminal.shows(&["Esc back"], SOON).await?;
    terminal.press("\x7f")?;
    terminal.shows(&["NO ANSWER"], SOON).await?;
    warden.kid.signal(Signal::CONT);
    wait_until("it answers again", SOON, async || !terminal.screen().contains("NO ANSWER")).await?;
    warden.terminate(SOON).await?;
    terminal.shows(&["no llama-warden is running here"], SOON).await?;
    let warden = warden.again().await?;
    warden.until_ready(1).await?;
    terminal.shows(&["llama-warden was restarted"], SOON).await?;
    terminal.press("\x03")?;
    assert_eq!(terminal.exit(SOON).await?, 0);
    is_given_back(&terminal).await
}

/// Waits for the shell's prompt: earlier input may be lost while the terminal is restored.
async fn waits_for_a_command(terminal: &Terminal) -> Outcome {
    wait_until("the shell asks for a command", SOON, async || {
        let screen = terminal.screen();
        let last = screen.lines().map(str::trim_end).rfind(|line| !line.is_empty()).unwrap_or_default();
        !screen.contains("MODEL") && (last.ends_with('#') || last.ends_with('$'))
    })
    .await
}

#[tokio::test]
async fn top_stops_as_a_job_of_its_shell_and_comes_back() -> Outcome {
    let warden = running().await?;
    let mut terminal = Terminal::start(warden.home(), "/bin/sh".as_ref(), ["-i"], (100, 30))?;
    let program = binaries::llama_warden()?;
    // Otherwise the first prompt may come after the command, and be taken for the one after the stop.
    waits_for_a_command(&terminal).await?;
    terminal.press(&format!("'{}' top --interval 100ms\n", program.display()))?;
    terminal.shows(&["MODEL", "loaded"], SOON).await?;
    terminal.press("\x1a")?;
    waits_for_a_command(&terminal).await?;
    terminal.press("echo $((40 + 2))\n")?;
    terminal.shows(&["42"], SOON).await?;
    terminal.press("fg\n")?;
    terminal.shows(&["MODEL", "loaded"], SOON).await?;
    // Redrawing removes another program's output.
    terminal.press(ANEW)?;
    terminal.press("\r")?;
    terminal.shows(&["Esc back"], SOON).await?;
    terminal.press("q")?;
    waits_for_a_command(&terminal).await?;
    terminal.press("echo $((40 + 3)); exit\n")?;
    terminal.shows(&["43"], SOON).await?;
    terminal.exit(SOON).await?;
    Ok(())
}

#[tokio::test]
async fn where_nobody_would_let_it_go_on_top_does_not_stop() -> Outcome {
    let warden = running().await?;
    let mut terminal = top(warden.home(), &["--read-only"])?;
    terminal.shows(&["loaded"], SOON).await?;
    terminal.press("\x1a")?;
    let before = warden.backends();
    terminal.press("dy")?;
    terminal.shows(&["only shows"], SOON).await?;
    assert_eq!(warden.backends(), before);
    terminal.press("q")?;
    assert_eq!(terminal.exit(SOON).await?, 0);
    is_given_back(&terminal).await
}

#[tokio::test]
async fn top_writes_one_screen_for_scripts() -> Outcome {
    let warden = running().await?;
    let once = warden.cli(&["top", "--once", "--interval", "100ms"]).await?;
    assert_eq!(once.code, 0, "{once:?}");
    for word in ["llama-warden", "MODEL", "m ", "loaded", "1 model"] {
        assert!(once.stdout.contains(word), "{word} is not in\n{}", once.stdout);
    }
    assert!(!once.stdout.contains('\x1b'), "{:?}", once.stdout);
    let named = warden.cli(&["top", "--once", "--interval", "100ms", "m"]).await?;
    assert!(named.code == 0 && named.stdout.contains("host "), "{named:?}");
    let none = warden.cli(&["top", "--once", "--interval", "100ms", "other"]).await?;
    assert!(none.code == 2 && none.stderr.contains("there is no model `other`"), "{none:?}");
    let pipe = warden.cli(&["top"]).await?;
    assert!(pipe.code == 2 && pipe.stderr.contains("llama-warden status"), "{pipe:?}");

    let home = setup()?.home;
    let nobody = home.warden(["top", "--once"], SOON).await?;
    assert!(nobody.code == 1 && nobody.stderr.contains("llama-warden serve"), "{nobody:?}");
    Ok(())
}

/// Measures the output of a static screen, for the documentation.
#[tokio::test]
async fn a_screen_that_stands_still_writes_next_to_nothing() -> Outcome {
    let warden = running().await?;
    let mut terminal = top(warden.home(), &[])?;
    terminal.shows(&["loaded"], SOON).await?;
    // Rates and memory settle; the least of several seconds is the cost of an idle fleet.
    let mut least = usize::MAX;
    wait_until("a second without much", SOON, async || {
        let before = terminal.written();
        tokio::time::sleep(Duration::from_secs(1)).await;
        least = least.min(terminal.written() - before);
        least < 200
    })
    .await?;
    terminal.press("q")?;
    terminal.exit(SOON).await?;
    is_given_back(&terminal).await
}
