//! Many clients that leave at random, and backends that die and stall: all counters must balance.

use super::*;
use crate::RequestOutcome;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const CLIENTS: u8 = 16;

/// A backend whose behaviour is given in the request, so that the expected answer is known.
async fn backend(mut peer: Peer<UnixStream>, executed: Arc<Mutex<HashMap<String, u32>>>) {
    while let Some((head, body)) = peer.request().await {
        let body = String::from_utf8(body).unwrap();
        let id = body.split('#').nth(1).unwrap().to_owned();
        *executed.lock().unwrap().entry(id.clone()).or_default() += 1;
        assert!(head.starts_with("POST"), "{head}");
        match () {
            () if body.contains("die") => return,
            () if body.contains("half") => {
                peer.send(EVENTS).await;
                peer.send_chunk(format!("data: {id}\n\ndata: ha").as_bytes()).await;
                return;
            }
            () if body.contains("events") => {
                peer.send(EVENTS).await;
                for _ in 0..5 {
                    peer.send_chunk(format!("data: {id}\n\n").as_bytes()).await;
                    tokio::task::yield_now().await;
                }
                peer.send(b"0\r\n\r\n").await;
                return;
            }
            () if body.contains("stall") => {
                peer.rest().await;
                return;
            }
            () => peer.send(&json_answer(&format!("{{\"id\":\"{id}\"}}"))).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_storm_the_books_balance() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let executed: Arc<Mutex<HashMap<String, u32>>> = Arc::default();
    let counting = executed.clone();
    let upstream = Upstream::start(move |peer| backend(peer, counting.clone()));
    let rig = Arc::new(Rig::with(Plan { room: 12, ..Plan::default() }, &[&upstream]).await);
    let mut clients = JoinSet::new();
    for client in 0..u64::from(CLIENTS) {
        let (rig, executed) = (rig.clone(), executed.clone());
        clients.spawn(async move {
            let mut dice = StdRng::seed_from_u64(seed ^ (client << 32));
            for n in 0..40 {
                let id = format!("{client}-{n}");
                let kind = ["plain", "events", "half", "die", "stall"][dice.random_range(0..5)];
                let stream = matches!(kind, "events" | "half");
                let fill = "x".repeat(dice.random_range(0..3) * 200_000);
                let body =
                    format!(r#"{{"model":"m","stream":{stream},"do":"{kind} #{id}#","fill":"{fill}"}}"#);
                let mut connection = rig.client().await;
                connection.send(&post("/v1/chat/completions", &body)).await;
                if kind == "stall" || dice.random_range(0..4) == 0 {
                    sleep(Duration::from_micros(dice.random_range(0..20_000))).await;
                    continue;
                }
                let (head, answer) = connection.response().await;
                let answer = String::from_utf8(answer).unwrap();
                let count = executed.lock().unwrap().get(&id).copied().unwrap_or(0);
                assert_eq!(count, 1, "{kind} {id}: {head}{answer}");
                match kind {
                    "plain" => assert_eq!(answer, format!("{{\"id\":\"{id}\"}}")),
                    "events" => assert_eq!(answer, format!("data: {id}\n\n").repeat(5)),
                    "half" => {
                        let rest = answer.strip_prefix(&format!("data: {id}\n\n")).unwrap();
                        assert!(rest.starts_with("data: {\"error\""), "{answer}");
                    }
                    _ => assert!(head.starts_with("HTTP/1.1 502 ") && head.contains("maybe"), "{head}"),
                }
            }
        });
    }
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
    rig.is_clean().await;
    assert!(executed.lock().unwrap().values().all(|count| *count <= 1), "executed twice");
    let records = rig.records.0.lock().unwrap().clone();
    let told = |outcome| records.iter().filter(|record| record.outcome == outcome).count();
    println!(
        "ok {}, gone {}, died {}, of {}",
        told(RequestOutcome::Ok),
        told(RequestOutcome::ClientGone),
        told(RequestOutcome::UpstreamDied),
        records.len()
    );
    assert_eq!(
        told(RequestOutcome::Ok) + told(RequestOutcome::ClientGone) + told(RequestOutcome::UpstreamDied),
        records.len()
    );
    assert!(
        told(RequestOutcome::Ok) > 50
            && told(RequestOutcome::ClientGone) > 50
            && told(RequestOutcome::UpstreamDied) > 50
    );
    eventually("only idle connections are left", || upstream.open() <= usize::from(CLIENTS)).await;
}
