//! DNS rebinding: a web page whose own host name points to llama-warden's address gets no access.

use serde_json::json;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Http, Outcome, Trouble, wait_until};

async fn status(http: &Http, host: &str) -> Result<u16, Trouble> {
    let body = chat("c", "m", "hi", 2, false).to_string();
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nConnection: close\r\n");
    let mut raw = http.raw().await?;
    raw.write(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes()).await?;
    let answer = raw.to_end(SOON).await?;
    Ok(answer.split(' ').nth(1).unwrap_or_default().parse()?)
}

#[tokio::test]
async fn with_closed_doors_a_page_under_a_name_of_its_own_is_refused_and_a_reload_opens_them() -> Outcome {
    let setup = Setup::new()?.top("server.cors = \"off\"").fake("m", &json!({}), "")?;
    let mut warden = setup.start().await?;
    warden.until_ready(1).await?;
    let port = warden.address().port();
    for host in [format!("127.0.0.1:{port}"), format!("localhost:{port}"), format!("[::1]:{port}")] {
        assert_eq!(status(&warden.http, &host).await?, 200, "{host}");
    }
    let executed = warden.ledger().executions()?["c"].len();
    for host in ["evil.example", "127.0.0.1.evil.example"] {
        assert_eq!(status(&warden.http, host).await?, 421, "{host}");
    }
    assert_eq!(warden.ledger().executions()?["c"].len(), executed, "a page got through");
    let refused = "llama_warden_request_outcomes_total{model=\"\",outcome=\"name\"}";
    assert_eq!(warden.metric(refused).await?, Some(2.0), "{}", warden.admin().get("/metrics").await?.text());
    let named =
        warden.setup.config().replace("cors = \"off\"", "cors = \"off\"\nserver.names = [\"evil.example\"]");
    warden.reload(&named)?;
    wait_until("the name is taken", SOON, async || {
        status(&warden.http, "evil.example").await.is_ok_and(|status| status == 200)
    })
    .await?;
    assert_eq!(status(&warden.http, "other.example").await?, 421);
    Ok(())
}

#[tokio::test]
async fn out_of_the_box_every_name_is_taken_as_by_llama_server() -> Outcome {
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    assert_eq!(status(&warden.http, "proxy.example").await?, 200);
    Ok(())
}
