//! Processes that come up with less GPU offload than earlier ones.

use warden_policies::Reason;

use super::script::Role;
use super::*;

const GIB: u64 = 1 << 30;

fn on_gpu(layers: u32, vram: u64) -> Role {
    let says = vec![format!("load_tensors: offloaded {layers}/33 layers to GPU")];
    Role { says, vram: Some(vram), ..Role::default() }
}

fn degraded(rig: &Rig) -> Vec<String> {
    let backends = &rig.fleet.view().models[0].backends;
    backends.iter().filter_map(|backend| backend.degraded.clone()).collect()
}

fn told(rig: &Rig) -> usize {
    let about = |kind: &EventKind| matches!(kind, EventKind::Unwell { reason: Reason::Degraded, .. });
    rig.events().iter().filter(|(_, kind)| about(kind)).count()
}

async fn rig(replace: ReplaceMode, roles: impl IntoIterator<Item = Role>) -> Rig {
    let rig = Rig::new(|config, script| {
        config.models[0].run.replace = replace;
        script.set_gpus(&[80 * GIB]);
        script.all(roles);
    })
    .await;
    drop(rig.lease().await.unwrap());
    pass(secs(10)).await;
    rig
}

#[tokio::test(start_paused = true)]
async fn the_old_process_stays_where_the_new_half_of_an_overlap_has_lost_the_gpu() {
    let rig = rig(ReplaceMode::Overlap, [on_gpu(33, 8 * GIB), on_gpu(0, 0)]).await;
    let failed = rig.fleet.restart("m").await.unwrap_err();
    assert!(failed.to_string().contains("0 of 33 layers"), "{failed}");
    let view = rig.fleet.view();
    let generation = view.models[0].backends[0].generation;
    assert_eq!((rig.state(), generation), (ModelState::Loaded, Some(GenerationId(1))));
    let lease = rig.lease().await.unwrap();
    assert_eq!(lease.generation(), GenerationId(1));
    drop(lease);
    assert!(rig.ledger()[0].failed.as_ref().unwrap().contains("the running process stays"));
    assert_eq!((told(&rig), degraded(&rig)), (1, Vec::new()));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn in_sequence_it_serves_says_so_and_is_started_again_once_the_memory_can_be_had() {
    let rig = rig(ReplaceMode::Sequential, [on_gpu(33, 8 * GIB), on_gpu(0, 0), on_gpu(33, 8 * GIB)]).await;
    // Another program uses the GPU.
    rig.script.lose(78 * GIB);
    rig.fleet.restart("m").await.unwrap();
    pass(secs(1)).await;
    assert_eq!((rig.state(), told(&rig), degraded(&rig).len()), (ModelState::Loaded, 1, 1));
    pass(secs(1800)).await;
    assert_eq!(rig.script.children().len(), 2, "no start without the memory for it");
    rig.script.lose(0);
    pass(secs(130)).await;
    assert_eq!((rig.script.children().len(), degraded(&rig)), (3, Vec::new()));
    assert_eq!(rig.ledger().last().unwrap().reason, Reason::Degraded);
    pass(secs(20_000)).await;
    assert_eq!(rig.script.children().len(), 3);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn starts_that_bring_nothing_back_come_after_growing_pauses() {
    let rig = rig(ReplaceMode::Sequential, [on_gpu(33, 8 * GIB)]).await;
    rig.script.all((0..40).map(|_| on_gpu(0, 0)));
    rig.fleet.restart("m").await.unwrap();
    pass(secs(24 * 3600)).await;
    let starts = rig.script.children().len();
    assert!((20..45).contains(&starts), "{starts} starts in a day");
    assert_eq!(degraded(&rig).len(), 1);
    rig.script.clear();
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn what_one_run_knew_the_next_one_knows_and_other_flags_are_another_process() {
    let mut rig = rig(ReplaceMode::Sequential, [on_gpu(33, 8 * GIB), on_gpu(10, 2 * GIB)]).await;
    rig.apply(|config| config.models[0].command.args.extend(["-ngl", "10"].map(str::to_owned))).await;
    pass(secs(30)).await;
    assert_eq!((rig.script.children().len(), degraded(&rig)), (2, Vec::new()), "as asked for");
    assert!(rig.fleet.state_writer().flush(secs(30)));
    let known = std::fs::read_to_string(rig.config.state_dir.join("growth.json")).unwrap();
    assert!(known.contains("\"layers\": 33") && known.contains("\"layers\": 10"), "{known}");
    rig.end().await;
}
