//! Finds the paths that a server has. A missing path is answered by 404 for every method; a disabled one by
//! another status.

use reqwest::Method;
use serde_json::json;

use crate::client::{LabClient, LabRequest, LabRequestError};
use crate::lab::Lab;

/// Returns the `paths` that the server has.
pub(super) async fn existing_paths(lab: &Lab, client: &LabClient, paths: &[String]) -> Vec<String> {
    let limit = lab.numbers.question_limit;
    let mut known = Vec::new();
    for path in paths {
        let get = LabRequest { method: Method::GET, body: None, ..LabRequest::post(path, json!({})) };
        let is_there = |answer: Result<(), LabRequestError>| {
            !matches!(answer, Err(LabRequestError::Refused { status: 404, .. }))
        };
        // No route can do anything with an empty request.
        if is_there(client.send_head(&get, limit).await)
            || is_there(client.send_head(&LabRequest::post(path, json!({})), limit).await)
        {
            known.push(path.clone());
        }
    }
    known
}
