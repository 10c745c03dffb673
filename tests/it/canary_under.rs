//! A canary under load fails no request: with a model from the command line, and another model that needs
//! memory.

use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use warden_rig::swarm::{all_whole, requests, same, swarm};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, FakeGpu, FakeNvml, Outcome, wait_until};

use crate::canary::{HASTY, OFTEN, another_build, canaries, ended, executed_by, start, undisturbed, view_of};
use crate::drop_in;

#[tokio::test]
async fn a_model_of_the_command_line_has_a_canary_like_any_other() -> Outcome {
    let setup = drop_in::setup()?;
    let binary = another_build(&setup, &json!({"ms_per_token": 3}))?;
    let args = drop_in::words(&["serve", "--", "-m", "model.gguf", "-np", "8", "--port", "0", "-a", "m"]);
    let warden = setup.start_with(&args).await?;
    warden.until_ready(1).await?;
    start(&warden, &binary, &["--share", "50%"]).await?;
    let all = requests("d", "m", 40, 20);
    let wanted = undisturbed(&all, &json!({})).await?;
    let (http, batch) = (warden.http.clone(), all.clone());
    let mut load = JoinSet::new();
    load.spawn(async move { swarm(&http, &batch, 8).await });
    wait_until("the canary answers", SOON, async || {
        let view = view_of(&warden).await.unwrap_or_default();
        view["report"]["canary"]["requests"].as_u64() > Some(0)
    })
    .await?;
    for victim in canaries(&warden) {
        victim.signal(Signal::KILL);
    }
    same(&wanted, &load.join_next().await.context("a load")??)?;
    let shown = warden.cli(&["canary", "status", "m", "--json"]).await?;
    let view: Value = serde_json::from_str(&shown.stdout)?;
    assert!(view["report"]["canary"]["failures"].as_u64() > Some(0), "{view}");
    Ok(())
}

#[tokio::test]
async fn a_canary_leaves_a_gpu_before_any_model_does() -> Outcome {
    const MIB: u64 = 1 << 20;
    let slow = json!({"ms_per_token": 5});
    let mut setup = Setup::new()?.top(OFTEN).top("internal.sensors.gpu_age = \"1ms\"");
    setup.home.sample_model("model.gguf").await?;
    let nvml = FakeNvml::in_home(&mut setup.home)?;
    let gpu = |pids: &[u32]| FakeGpu::shared_by(pids, 2048 * MIB, 720 * MIB);
    nvml.say(&[gpu(&[])])?;
    let setup = setup.fake("m", &slow, HASTY)?.fake("b", &json!({}), "preload = false\n")?;
    let binary = another_build(&setup, &slow)?;
    let warden = setup.start().await?;
    let pids =
        || -> Vec<u32> { warden.backends().iter().filter_map(|one| u32::try_from(one.pid).ok()).collect() };
    let tells = async {
        loop {
            if nvml.say(&[gpu(&pids())]).is_err() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    };
    let works = async {
        let own = warden.until_ready(1).await?[0].pid;
        start(&warden, &binary, &["--share", "50%"]).await?;
        // The two processes keep answering while the third starts.
        let all = requests("g", "m", 80, 20);
        let (http, batch) = (warden.http.clone(), all.clone());
        let mut load = JoinSet::new();
        load.spawn(async move { swarm(&http, &batch, 8).await });
        wait_until("the canary answers", SOON, async || {
            let canary: Vec<i32> = canaries(&warden).iter().map(|process| process.pid).collect();
            executed_by(&warden).is_ok_and(|by| by.values().any(|pids| canary.contains(&pids[0])))
        })
        .await?;
        let answer = warden.http.post(CHAT, &chat("third", "b", "hi", 3, false)).await?;
        assert!(answer.status.is_success(), "{}", answer.text());
        let view = ended(&warden).await?;
        assert_eq!(view["verdict"], "undecided", "{view}");
        assert!(view["missing"].to_string().contains("there is no room for it: `b` needs it"), "{view}");
        all_whole(&load.join_next().await.context("a load")??)?;
        let stays = warden.backends().iter().any(|process| process.pid == own);
        assert!(stays, "its model left: {}", warden.cli(&["events"]).await?.stdout);
        wait_until("no canary is left", SOON, async || canaries(&warden).is_empty()).await
    };
    tokio::select! {
        done = works => done,
        () = tells => panic!("the GPU cannot be told"),
    }
}
