//! Files that are valid, invalid, and change.

use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use tempfile::TempDir;

use super::*;

struct Files {
    dir: TempDir,
    files: TlsFiles,
}

impl Files {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let files = TlsFiles { cert: dir.path().join("cert.pem"), key: dir.path().join("key.pem") };
        Self { dir, files }
    }

    fn write(&self, cert: &str, key: &str) {
        // Renewals rename a new file into place.
        for (path, text) in [(&self.files.cert, cert), (&self.files.key, key)] {
            let fresh = self.dir.path().join("fresh");
            std::fs::write(&fresh, text).unwrap();
            std::fs::rename(&fresh, path).unwrap();
        }
    }

    fn load(&self) -> Result<TlsState, TlsError> {
        TlsState::load(self.files.clone())
    }
}

fn pair(from: i32, to: i32) -> (String, String) {
    let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    params.not_before = date_time_ymd(from, 1, 1);
    params.not_after = date_time_ymd(to, 1, 1);
    let key = KeyPair::generate().unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

#[test]
fn a_good_pair_is_taken_and_its_end_is_known() {
    let files = Files::new();
    let (cert, key) = pair(2020, 2100);
    files.write(&cert, &key);
    // 2100-01-01T00:00:00Z
    assert_eq!(files.load().unwrap().certificate().not_after, 4_102_444_800);
}

#[test]
fn what_is_wrong_with_the_files_is_said_with_its_cure() {
    let files = Files::new();
    let ((cert, key), (_, other)) = (pair(2020, 2100), pair(2020, 2100));
    let says = |what: &str| {
        let text = files.load().unwrap_err().to_string();
        assert!(text.contains(what), "{text}");
    };
    says("cert.pem cannot be read");
    files.write(&cert, &other);
    says("does not belong to the certificate");
    files.write(&cert, "nothing");
    says("BEGIN PRIVATE KEY");
    files.write(&key, &key);
    says("BEGIN CERTIFICATE");
    files.write("-----BEGIN CERTIFICATE-----\n%%%\n-----END CERTIFICATE-----\n", &key);
    says("is not valid PEM");
    files.write("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", &key);
    says("cannot be used");
    let (old, old_key) = pair(2000, 2001);
    files.write(&old, &old_key);
    says("expired");
    let (early, early_key) = pair(2098, 2099);
    files.write(&early, &early_key);
    says("not valid yet");
    std::fs::remove_file(&files.files.key).unwrap();
    files.write(&cert, &key);
    std::fs::remove_file(&files.files.key).unwrap();
    says("the TLS key ");
    let half = TlsFiles::from_settings("cert.pem", "").unwrap();
    assert!(matches!(TlsState::load(half), Err(TlsError::OneOnly)));
    assert_eq!(TlsFiles::from_settings("", ""), None);
}

#[test]
fn a_new_pair_is_taken_and_a_bad_one_leaves_the_old_in_place() {
    let files = Files::new();
    let (cert, key) = pair(2020, 2100);
    files.write(&cert, &key);
    let tls = files.load().unwrap();
    assert!(tls.reload_if_changed().is_none(), "nothing has changed");
    let (newer, newer_key) = pair(2020, 2110);
    files.write(&newer, &newer_key);
    let taken = tls.reload_if_changed().unwrap().unwrap();
    assert!(taken.not_after > 4_102_444_800 && tls.certificate() == taken);
    files.write("broken", "broken");
    assert!(tls.reload_if_changed().unwrap().is_err());
    assert_eq!(tls.certificate(), taken, "the old one stays");
    assert!(tls.reload_if_changed().is_none(), "told once");
    files.write(&cert, &key);
    assert!(tls.reload_if_changed().unwrap().is_ok(), "and it goes on");
}
