//! Who waits in an old program for a model that is not loaded: the one that decides hears of it, however many are between.

use http_body_util::BodyExt as _;
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpStream;
use warden_rig::http::json_request;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Http, Outcome, Trouble, Warden, wait_until};

use super::{until_alone, upgrade};

/// A connection that is kept.
struct Client(http1::SendRequest<http_body_util::Full<hyper::body::Bytes>>);

impl Client {
    async fn connect(warden: &Warden) -> Result<Self, Trouble> {
        let Http::Tcp(address) = warden.http else { return Err(Trouble::new("it listens at a path")) };
        let (sender, connection) = http1::handshake(TokioIo::new(TcpStream::connect(address).await?)).await?;
        tokio::spawn(async move { drop(connection.await) });
        Ok(Self(sender))
    }

    /// Whether the connection was closed with the answer.
    async fn ask(&mut self, id: &str, model: &str) -> Result<bool, Trouble> {
        let mut request = json_request(CHAT, &chat(id, model, "hi", 3, false))?;
        request.headers_mut().insert(HOST, "localhost".parse()?);
        let asked = tokio::time::timeout(SOON, self.0.send_request(request)).await;
        let answer = asked.context(format!("{id}: no answer in time"))??;
        let closes = answer.headers().get(CONNECTION).is_some_and(|value| value == "close");
        let (status, body) = (answer.status(), answer.into_body().collect().await?.to_bytes());
        status.is_success().then_some(closes).context(format!("{id}: {status} {body:?}"))
    }
}

#[tokio::test]
async fn a_model_is_loaded_for_who_asks_an_old_program_and_that_through_another_old_one() -> Outcome {
    for upgrades in [1, 2] {
        let mut setup = Setup::new()?;
        for name in ["a", "b"] {
            setup = setup.fake(name, &json!({"load_ms": 30}), "preload = false\nqueue.wait = \"1h\"\n")?;
        }
        let warden = setup.start().await?;
        let mut client = Client::connect(&warden).await?;
        assert!(!client.ask("first", "a").await?, "it is kept");
        for _ in 0..upgrades {
            upgrade(&warden).await?;
        }
        assert_eq!(warden.state("b").await?, "unloaded");
        assert!(client.ask("second", "b").await?, "{upgrades}: by the one before, which keeps no connection");
        wait_until("nobody waits any more", SOON, async || {
            let status = warden.admin().get("/status").await;
            let models =
                status.and_then(|answer| answer.json()).map(|status| status["fleet"]["models"].clone());
            models.is_ok_and(|models| {
                models.as_array().is_some_and(|all| all.iter().all(|one| one["waiting"] == 0))
            })
        })
        .await?;
        // Whoever is between goes when what it had to tell is over.
        until_alone(&warden).await?;
    }
    Ok(())
}
