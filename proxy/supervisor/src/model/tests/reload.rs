//! New configurations.

use warden_policies::{Reason, ServerFacts, StreamHeadTime};

use super::script::Role;
use super::*;
use crate::lease::cell::LeaseAddress;
use crate::process::endpoint::ListenAddress;
use crate::process::group::ProcessExit;
use crate::spec::SocketMode;
use crate::{FleetError, ResolveError};

fn names(names: &[&str]) -> Vec<ModelName> {
    names.iter().map(ModelName::new).collect()
}

#[tokio::test(start_paused = true)]
async fn only_models_whose_command_changed_get_new_processes() {
    let mut rig = Rig::new(|config, _| {
        config.models = ["m", "b", "c"].map(spec).to_vec();
        for model in &mut config.models {
            model.run.preload = true;
        }
    })
    .await;
    pass(secs(1)).await;
    let report = rig
        .apply(|config| {
            config.models[0].command.args.push("-fa".to_owned());
            config.models[1].requests.queue.depth = 7;
        })
        .await;
    assert_eq!(report.restarted, names(&["m"]));
    assert_eq!(report.updated, names(&["b"]));
    assert_eq!(report.unchanged, names(&["c"]));
    pass(secs(1)).await;
    assert_eq!(rig.script.children().len(), 4);
    assert!(rig.script.last().request.command.args.contains(&"-fa".to_owned()));
    let entry = &rig.ledger()[0];
    assert_eq!((entry.reason, entry.model.as_str()), (Reason::Configuration, "m"));
    assert_eq!(rig.fleet.view().models[1].queue_depth, 7);
    assert_eq!(rig.count("config_applied"), 1);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_change_back_while_the_old_process_drains_ends_with_the_last_configuration() {
    let mut rig = Rig::new(|_, _| {}).await;
    let held = rig.lease().await.unwrap();
    rig.apply(|config| config.models[0].command.args.push("-x".to_owned())).await;
    pass(secs(1)).await;
    rig.apply(|config| config.models[0].command.args[2] = "-y".to_owned()).await;
    drop(held);
    pass(secs(5)).await;
    assert_eq!((rig.script.children().len(), rig.script.alive()), (2, 1));
    assert_eq!(rig.script.last().request.command.args[2], "-y");
    rig.apply(|config| config.models[0].command.args[2] = "-z".to_owned()).await;
    rig.apply(|config| config.models[0].command.args[2] = "-y".to_owned()).await;
    pass(secs(5)).await;
    assert_eq!((rig.script.last().request.command.args[2].as_str(), rig.script.alive()), ("-y", 1));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn models_come_and_go() {
    let mut rig = Rig::new(|_, _| {}).await;
    let held = rig.lease().await.unwrap();
    let waiting = {
        let _other = rig.lease().await.unwrap();
        let waiting = rig.lease_later().await;
        assert!(!waiting.is_finished());
        let report = rig.apply(|config| config.models = vec![spec("n")]).await;
        assert_eq!((report.added, report.removed), (names(&["n"]), names(&["m"])));
        waiting
    };
    assert_eq!(waiting.await.unwrap().unwrap_err(), LeaseDenied::Removed);
    assert!(matches!(rig.fleet.resolve(Some("m")), Err(ResolveError::Unknown { .. })));
    assert_eq!(rig.lease().await.unwrap_err(), LeaseDenied::Removed);
    assert_eq!(rig.script.alive(), 1, "it finishes what it has");
    assert_eq!(rig.fleet.view().models.len(), 1);
    drop(held);
    pass(secs(1)).await;
    assert_eq!(rig.script.alive(), 0);
    let n = rig.fleet.lease(&ModelName::new("n"), LeaseKind::Slot).await.unwrap();
    assert_eq!(n.model().as_str(), "n");
    drop(n);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_model_that_comes_back_while_it_still_drains_is_a_new_one() {
    let mut rig = Rig::new(|_, _| {}).await;
    let held = rig.lease().await.unwrap();
    rig.apply(|config| config.models.clear()).await;
    rig.apply(|config| config.models = vec![spec("m")]).await;
    assert_eq!(rig.state(), ModelState::Unloaded);
    let new = rig.lease().await.unwrap();
    assert_eq!((new.generation(), rig.script.alive()), (GenerationId(2), 2));
    drop((held, new));
    pass(secs(1)).await;
    assert_eq!((rig.script.alive(), rig.state()), (1, ModelState::Loaded));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_command_that_does_not_start_stops_the_rollout_and_a_better_one_is_taken_at_once() {
    let mut rig = Rig::new(|config, _| {
        config.models[0].run.replicas = 2;
        config.models[0].run.preload = true;
    })
    .await;
    pass(secs(1)).await;
    for _ in 0..9 {
        rig.script.next(Role::failing(ProcessExit::Code(1), "error: invalid argument: --x"));
    }
    rig.apply(|config| config.models[0].command.args.push("--x".to_owned())).await;
    pass(secs(600)).await;
    assert_eq!((rig.script.alive(), rig.state()), (1, ModelState::Loaded), "the other replica serves on");
    // After this many failures no more processes are started; remaining roles would fail as well.
    while rig.script.children().len() < 2 + 5 {
        pass(secs(1)).await;
    }
    rig.script.clear();
    rig.apply(|config| config.models[0].command.args[2] = "--y".to_owned()).await;
    pass(secs(5)).await;
    let last = rig.script.children().into_iter().rev().take(2);
    assert!(last.into_iter().all(|child| child.request.command.args[2] == "--y"));
    assert_eq!(rig.script.alive(), 2);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn replicas_are_added_and_taken_away_without_touching_the_others() {
    let mut rig = Rig::new(|config, _| config.models[0].run.preload = true).await;
    pass(secs(1)).await;
    rig.apply(|config| config.models[0].run.replicas = 3).await;
    pass(secs(1)).await;
    assert_eq!(rig.script.alive(), 3);
    rig.apply(|config| config.models[0].run.replicas = 1).await;
    pass(secs(1)).await;
    assert_eq!((rig.script.alive(), rig.script.children().len()), (1, 3));
    assert_eq!(rig.lease().await.unwrap().generation(), GenerationId(1));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_is_wrong_with_a_configuration_is_named_and_nothing_is_taken_over() {
    let mut rig = Rig::new(|_, _| {}).await;
    let good = rig.config.clone();
    let mut bad = good.clone();
    bad.models.push(spec("n"));
    bad.models[1].aliases = vec!["m".to_owned()];
    let error = rig.fleet.apply(bad).await.unwrap_err();
    assert!(matches!(&error, FleetError::DuplicateName { name, .. } if name == "m"), "{error}");
    let mut bad = good.clone();
    bad.models.push(spec("m"));
    assert!(matches!(rig.fleet.apply(bad).await, Err(FleetError::DuplicateName { .. })));
    let mut bad = good.clone();
    bad.models[0].run.replicas = 0;
    assert!(matches!(rig.fleet.apply(bad).await, Err(FleetError::NoReplicas(_))));
    let mut bad = good.clone();
    bad.runtime_dir = bad.runtime_dir.join("x".repeat(90));
    let error = rig.fleet.apply(bad).await.unwrap_err();
    assert!(matches!(error, FleetError::SocketPath { .. }) && error.to_string().contains("xxx"), "{error}");
    let report = rig.apply(|config| config.state_dir = "/elsewhere".into()).await;
    assert_eq!(report.needs_restart, ["state_dir"]);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_becomes_known_of_a_binary_reaches_leases_that_are_held_and_replaces_nothing() {
    let mut rig = Rig::new(|_, _| {}).await;
    let held = rig.lease().await.unwrap();
    assert_eq!(held.server_facts(), ServerFacts::default());
    let facts = ServerFacts { stream_head: StreamHeadTime::BeforeFirstToken, ..ServerFacts::default() };
    rig.fleet
        .learn_facts(
            &ModelName::new("m"),
            "/opt/another".as_ref(),
            ServerFacts { unix_sockets: Some(false), ..facts },
        )
        .await;
    rig.fleet.learn_facts(&ModelName::new("m"), "/opt/llama-server".as_ref(), facts).await;
    rig.fleet.learn_facts(&ModelName::new("n"), "/opt/llama-server".as_ref(), ServerFacts::default()).await;
    // The next view follows the message.
    pass(secs(1)).await;
    assert_eq!(held.server_facts(), facts);
    let report = rig.apply(|config| config.models[0].facts = facts).await;
    assert_eq!(report.unchanged, names(&["m"]), "a reload finds what was learned");
    let more = ServerFacts { http_threads: Some(4), ..facts };
    let report = rig.apply(|config| config.models[0].facts = more).await;
    assert_eq!(report.updated, names(&["m"]));
    assert_eq!((held.server_facts(), rig.script.children().len()), (more, 1));
    drop(held);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_binary_that_takes_no_unix_socket_gets_a_port_unless_the_configuration_insists() {
    for (socket, known, port) in [
        (SocketMode::Auto, None, false),
        (SocketMode::Auto, Some(true), false),
        (SocketMode::Auto, Some(false), true),
        (SocketMode::Unix, Some(false), false),
        (SocketMode::Tcp, Some(true), true),
    ] {
        let rig = Rig::new(|config, _| {
            config.models[0].run.socket = socket;
            config.models[0].facts.unix_sockets = known;
        })
        .await;
        let lease = rig.lease().await.unwrap();
        assert_eq!(
            matches!(lease.address(), LeaseAddress::Process(ListenAddress::Tcp(_))),
            port,
            "{socket:?}, {known:?}"
        );
        drop(lease);
        rig.end().await;
    }
}

#[tokio::test(start_paused = true)]
async fn changed_models_are_replaced_one_after_another() {
    let mut rig = Rig::new(|config, script| {
        config.models = ["m", "b", "c"].map(spec).to_vec();
        for model in &mut config.models {
            model.run.preload = true;
            model.run.replace = ReplaceMode::Auto;
        }
        script.set_available(1 << 40);
    })
    .await;
    pass(secs(10)).await;
    rig.apply(|config| {
        for model in &mut config.models {
            model.command.args.push("-fa".to_owned());
        }
    })
    .await;
    pass(secs(60)).await;
    assert_eq!((rig.script.alive(), rig.script.children().len()), (3, 6));
    let kinds = rig.kinds();
    let of_replacements: Vec<&str> =
        kinds.iter().map(String::as_str).filter(|kind| kind.starts_with("recycle_")).collect();
    assert_eq!(of_replacements, ["recycle_began", "recycle_done"].repeat(3), "{kinds:?}");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_leaves_makes_room_before_a_new_model_starts() {
    let mut rig = Rig::new(|config, script| {
        config.models[0].run.preload = true;
        script.next(Role { term_takes: Some(secs(3)), ..Role::default() });
    })
    .await;
    rig.until(ModelState::Loaded).await;
    let renamed = |config: &mut FleetConfig| config.models = vec![preloaded("n")];
    rig.apply(renamed).await;
    pass(secs(2)).await;
    assert_eq!((rig.script.alive(), rig.script.children().len()), (1, 1));
    pass(secs(2)).await;
    assert_eq!((rig.script.alive(), rig.script.children().len()), (1, 2));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_load_that_finds_no_room_while_another_drains_is_waited_out() {
    let mut rig = Rig::new(|config, script| {
        config.models[0].run.preload = true;
        script.next(Role::default());
        for _ in 0..4 {
            script.next(Role::failing(ProcessExit::Code(1), "ggml_aligned_malloc: insufficient memory"));
        }
    })
    .await;
    let held = rig.lease().await.unwrap();
    rig.apply(|config| config.models = vec![preloaded("n")]).await;
    pass(secs(60)).await;
    assert_eq!(rig.count("crash_loop"), 0);
    let n = rig.fleet.lease(&ModelName::new("n"), LeaseKind::Slot).await.unwrap();
    drop((held, n));
    rig.end().await;
}

/// A preloaded model.
fn preloaded(name: &str) -> SharedSpec {
    let mut spec = spec(name);
    spec.run.preload = true;
    spec
}

#[tokio::test(start_paused = true)]
async fn a_running_canary_gets_new_settings_of_all_models_too() {
    let mut rig = Rig::new(|config, _| config.watch.sensors.interval = secs(120)).await;
    let lease = rig.lease().await.unwrap();
    let canary = crate::CanarySpec {
        binary: std::env::current_exe().unwrap(),
        build: None,
        facts: ServerFacts::default(),
        share: 0.1,
        numbers: defaults().canary,
    };
    rig.fleet.start_canary("m", canary).await.unwrap();
    pass(secs(60)).await;
    let canary = rig.script.last();
    let before = canary.readings();
    rig.apply(|config| config.watch.sensors.interval = secs(1)).await;
    // The next reading was planned with the old interval.
    pass(secs(160)).await;
    let read = canary.readings() - before;
    assert!(read > 50, "{read} readings");
    drop(lease);
    rig.end().await;
}
