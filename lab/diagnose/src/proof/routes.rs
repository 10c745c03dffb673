//! Which paths a server has. One that it has not is answered by 404, whatever the method; one that is switched off, by something else.

use reqwest::Method;
use serde_json::json;

use crate::client::{Ask, AskError, Client};
use crate::lab::Lab;

/// Those of `paths` that it has.
pub(super) async fn of(lab: &Lab, client: &Client, paths: &[String]) -> Vec<String> {
    let limit = lab.numbers.question_limit;
    let mut known = Vec::new();
    for path in paths {
        let get = Ask { method: Method::GET, body: None, ..Ask::post(path, json!({})) };
        let is_there =
            |answer: Result<(), AskError>| !matches!(answer, Err(AskError::Refused { status: 404, .. }));
        // An empty request is one that no route can do anything with.
        if is_there(client.head(&get, limit).await)
            || is_there(client.head(&Ask::post(path, json!({})), limit).await)
        {
            known.push(path.clone());
        }
    }
    known
}
