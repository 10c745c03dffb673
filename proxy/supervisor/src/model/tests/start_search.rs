//! Processes that die while they load: an option is searched once, and used only if the fallback allows it.

use warden_policies::start_search::StartSwitch;

use super::script::Role;
use super::*;
use crate::spec::FallbackSpec;
use crate::{FailureKind, ProcessExit};

fn dies() -> Role {
    Role::failing(ProcessExit::Signal(libc::SIGSEGV), "loading")
}

fn switch(flag: &str) -> StartSwitch {
    StartSwitch {
        item: flag.trim_start_matches('-').to_owned(),
        args: vec![flag.to_owned()],
        line: format!("write `{flag}`"),
        ..StartSwitch::default()
    }
}

fn searching(config: &mut FleetConfig) {
    config.models[0].run.preload = true;
    config.models[0].start.switches = vec![switch("--one"), switch("--two")];
}

/// Words that each process got in addition to the command.
fn added(rig: &Rig) -> Vec<String> {
    let word = |words: &[String]| words.get(2).filter(|word| *word != "--host").cloned().unwrap_or_default();
    rig.script.children().iter().map(|child| word(&child.request.command.args)).collect()
}

async fn until_event(rig: &Rig, kind: &str) {
    for _ in 0..100_000 {
        if rig.count(kind) > 0 {
            return;
        }
        pass(Duration::from_millis(10)).await;
    }
    panic!("no {kind}: {:?}", rig.kinds());
}

#[tokio::test(start_paused = true)]
async fn the_switch_that_starts_a_dying_server_is_named_and_not_used_and_starts_end() {
    let rig = Rig::new(|config, script| {
        searching(config);
        script.all([dies(), dies(), dies(), Role::default(), dies()]);
        script.set_usual(dies());
    })
    .await;
    until_event(&rig, "start_searched").await;
    rig.until(ModelState::Failed).await;
    assert_eq!(added(&rig), ["", "", "--one", "--two", ""]);
    let failure = rig.fleet.view().models[0].last_failure.clone().unwrap();
    assert_eq!(failure.kind, FailureKind::Signal);
    assert!(failure.message.ends_with("with `--two` it starts: write `--two`"), "{}", failure.message);
    let Err(LeaseDenied::Failed(told, _)) = rig.lease().await else { panic!("it waits for a change") };
    assert!(told.message.contains("--two"), "{}", told.message);
    // Later attempts fail in the same way, and no search is repeated.
    pass(secs(601)).await;
    rig.until(ModelState::Failed).await;
    assert_eq!((rig.count("start_search_began"), rig.script.children().len()), (1, 6));
    let failure = rig.fleet.view().models[0].last_failure.clone().unwrap();
    assert!(failure.message.ends_with("with `--two` it starts: write `--two`"), "{}", failure.message);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_finding_is_remembered_by_the_next_instance() {
    let directory = tempfile::tempdir().unwrap();
    for (instance, starts) in [(0, 5), (1, 1)] {
        let mut config = config(directory.path());
        searching(&mut config);
        let script = Script::default();
        if instance == 0 {
            script.all([dies(), dies(), dies(), Role::default(), dies()]);
        }
        script.set_usual(dies());
        let fleet = Fleet::start_in(config.clone(), std::sync::Arc::new(script.clone())).await.unwrap();
        let rig = Rig { fleet, script, config, _directory: tempfile::tempdir().unwrap() };
        rig.until(ModelState::Failed).await;
        assert_eq!(rig.script.children().len(), starts);
        let failure = rig.fleet.view().models[0].last_failure.clone().unwrap();
        assert!(failure.message.contains("with `--two` it starts"), "{}", failure.message);
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_fallback_allows_is_used_by_itself() {
    let rig = Rig::new(|config, script| {
        searching(config);
        config.models[0].start.fallback = Some(FallbackSpec { args: vec!["--less".to_owned()], needs: None });
        script.all([dies(), dies(), Role::default(), dies(), Role::default()]);
    })
    .await;
    rig.until(ModelState::Loaded).await;
    assert_eq!(added(&rig), ["", "", "--less", "", "--less"]);
    let told = rig.events().into_iter().find_map(|(_, event)| match event {
        EventKind::FallsBack { message } => Some(message),
        _ => None,
    });
    assert_eq!(
        told.unwrap(),
        "started with --less added, because it died while it loaded: signal 11 (SIGSEGV)"
    );
    drop(rig.lease().await.unwrap());
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_start_that_fails_for_a_reason_with_a_name_is_not_searched() {
    for (exit, says) in [
        (ProcessExit::Code(1), "error: invalid argument: --bogus"),
        (ProcessExit::Code(1), "failed to open GGUF file"),
        (ProcessExit::Signal(libc::SIGABRT), "CUDA error: out of memory"),
        (ProcessExit::Code(7), "nothing of note"),
        (ProcessExit::Signal(libc::SIGKILL), "loading"),
    ] {
        let rig = Rig::new(|config, script| {
            searching(config);
            script.set_usual(Role::failing(exit, says));
        })
        .await;
        pass(secs(300)).await;
        assert_eq!(rig.count("start_search_began"), 0, "{says}");
        assert!(added(&rig).iter().all(String::is_empty), "{says}");
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_search_ends_with_its_process_when_the_model_is_unloaded_restarted_or_removed() {
    for (what, ends) in [("drain", 3), ("restart", 4), ("end", 3)] {
        let slow = Role { ready_after: secs(9999), ..Role::default() };
        let rig = Rig::new(|config, script| {
            searching(config);
            script.all([dies(), dies(), slow]);
        })
        .await;
        until_event(&rig, "start_search_began").await;
        while rig.script.children().len() < 3 {
            pass(Duration::from_millis(10)).await;
        }
        match what {
            "drain" => rig.fleet.drain("m").await.unwrap(),
            "restart" => drop(rig.fleet.restart("m").await.unwrap()),
            _ => {}
        }
        if what != "end" {
            pass(secs(20)).await;
            let expected = if what == "drain" { ModelState::Unloaded } else { ModelState::Loaded };
            assert_eq!(
                (rig.state(), rig.script.alive()),
                (expected, usize::from(what == "restart")),
                "{what}"
            );
        }
        assert_eq!(rig.script.children().len(), ends, "{what}");
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_searched_beside_a_process_that_serves() {
    let rig = Rig::new(|config, script| {
        searching(config);
        config.models[0].run.replicas = 2;
        script.next(Role::default());
        script.set_usual(dies());
    })
    .await;
    rig.until(ModelState::Loaded).await;
    pass(secs(300)).await;
    assert_eq!(rig.count("start_search_began"), 0);
    assert!(rig.count("crashed") >= 2);
    rig.end().await;
}
