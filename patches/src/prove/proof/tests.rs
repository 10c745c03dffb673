//! A record is valid for its code only.

use std::collections::BTreeMap;

use super::*;
use crate::error::Result;
use crate::judge::judge;
use crate::set::SetOrigin;
use crate::set::load;
use crate::tree::{SourceRevision, SourceTree};

struct Texts(BTreeMap<&'static str, String>);

impl SourceTree for Texts {
    fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(path).map(|text| text.clone().into_bytes()))
    }

    fn revision(&self) -> SourceRevision {
        SourceRevision::default()
    }
}

fn tree(body: &str) -> Texts {
    Texts([("a.cpp", format!("int run(int n) {{\n    {body}\n    return n;\n}}\n"))].into())
}

fn set(insert: &str) -> PatchSet {
    let text = format!(
        "schema = 1\nid = \"mine\"\ntitle = \"t\"\n\n[[hook]]\nid = \"end\"\nfiles = [\"a.cpp\"]\n\
         container = {{ kind = \"function\", name = \"run\" }}\nanchor = \"return n;\"\nat = \"before\"\ninsert = [\"{insert}\"]\n\n\
         [[seam]]\nid = \"run\"\nfiles = [\"a.cpp\"]\ncontainer = {{ kind = \"function\", name = \"run\" }}\n\n\
         [[fix]]\nid = \"count\"\ntitle = \"t\"\nsymptom = \"s\"\n"
    );
    let read = |file: &str| {
        Ok(match file {
            "set.toml" => Some(text.clone().into_bytes()),
            "fingerprints.json" => Some(br#"{"schema":1,"seams":{}}"#.to_vec()),
            _ => None,
        })
    };
    load::load_set("mine", "mine", SetOrigin::Folder("/mine".into()), &read).unwrap()
}

#[test]
fn a_record_counts_for_the_set_and_the_code_that_it_was_shown_for() {
    let (own, at) = (set("count(n);"), "2026-11-26T07:00:00Z");
    let mut judged = judge(&own, &tree("n += 1;")).unwrap();
    assert!(judged.can_be_proved());
    let mut proofs = ProofRecords::default();
    assert_eq!(proofs.find(&own, &judged), Err(ProofObstacle::None));
    proofs.add(SetProof::new(&own, &judged, "x".into(), at.into()));
    proofs.add(SetProof::new(&own, &judged, "x".into(), at.into()));
    assert_eq!(proofs.all.len(), 1, "the same again takes the place of the older one");
    let again = ProofRecords::parse(&proofs.to_toml().unwrap()).unwrap();
    assert_eq!(again, proofs);
    judged.accept(&own, &proofs);
    assert_eq!(
        (judged.status, judged.fixes[0].status),
        (PatchStatus::LocallyVerified, PatchStatus::LocallyVerified)
    );
    assert_eq!(judged.proof.as_ref().map(|proof| proof.shown.as_str()), Some(at));

    // The record does not cover changed code, but covers the same code on other lines.
    let mut other = judge(&own, &tree("n += 2;")).unwrap();
    other.accept(&own, &proofs);
    assert_eq!(other.status, PatchStatus::Unverified);
    let why = proofs.find(&own, &other).unwrap_err().to_string();
    assert_eq!(why, format!("what was shown on {at} was shown for other code: run differs"));
    let mut commented = judge(&own, &tree("n += 1; // says nothing")).unwrap();
    commented.accept(&own, &proofs);
    assert_eq!(commented.status, PatchStatus::LocallyVerified, "a comment is no code");

    // The record does not cover another version of the set.
    let newer = set("count(n + 1);");
    let mut judged = judge(&newer, &tree("n += 1;")).unwrap();
    judged.accept(&newer, &proofs);
    assert_eq!(judged.status, PatchStatus::Unverified);
    assert!(proofs.find(&newer, &judged).unwrap_err().to_string().contains("another version of the set"));
}

#[test]
fn what_is_refused_or_damaged_is_never_taken_for_shown() {
    let own = set("count(n);");
    let judged = judge(&own, &tree("n += 1;")).unwrap();
    let mut proofs = ProofRecords::default();
    proofs.add(SetProof::new(&own, &judged, "x".into(), "t".into()));
    // The anchor occurs twice: a record cannot compensate for that.
    let mut refused = judge(&own, &tree("if (n) { return n; }")).unwrap();
    assert!(!refused.can_be_proved());
    refused.accept(&own, &proofs);
    assert_eq!(refused.status, PatchStatus::Refused);
    assert!(ProofRecords::parse("schema = 2\n").unwrap_err().contains("version 2"));
    assert!(ProofRecords::parse("schema = 1\n[[verified]]\nset = \"x\"\n").unwrap_err().contains("digest"));
}
