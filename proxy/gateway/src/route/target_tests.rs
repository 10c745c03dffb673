//! Targets that name their model, in all spellings.

use std::sync::Arc;

use proptest::prelude::*;
use warden_policies::ModelName;

use super::*;
use crate::tests::unloaded;

fn fleet(names: &[(&str, &[&str])]) -> FleetView {
    let one = |(name, aliases): &(&str, &[&str])| {
        let aliases = aliases.iter().map(|&alias| alias.to_owned()).collect();
        Arc::new(unloaded(&ModelName::new(name), aliases))
    };
    FleetView { models: names.iter().map(one).collect(), ..FleetView::default() }
}

fn found(target: &str, any_name: bool) -> Option<(String, String)> {
    let fleet = fleet(&[("a", &["a/v1", "nick name"]), ("org/b", &[])]);
    let named =
        parse_upstream(&Uri::try_from(target).unwrap(), &fleet, &std::iter::empty(), any_name).ok()?;
    Some((named.name, named.target.to_string()))
}

#[test]
fn the_longest_name_that_ends_with_a_segment_is_meant_and_the_rest_stays_as_it_is() {
    for (target, name, rest) in [
        ("/upstream/a/props", "a", "/props"),
        ("/upstream/a/v1/models?x=%20&y", "a/v1", "/models?x=%20&y"),
        ("/upstream/org/b/slots/0?action=save", "org/b", "/slots/0?action=save"),
        ("/upstream/org%2Fb/a%2Fb/../c//d", "org/b", "/a%2Fb/../c//d"),
        ("/upstream/org%2fb", "org/b", "/"),
        ("/upstream/%61/", "a", "/"),
        ("/upstream/a?x", "a", "/?x"),
        ("/upstream/nick%20name/x", "nick name", "/x"),
    ] {
        assert_eq!(found(target, false), Some((name.to_owned(), rest.to_owned())), "{target}");
    }
    for target in ["/upstream/", "/upstream/none/props", "/upstream/ab", "/upstream/org", "/upstream/%zz/x"] {
        assert_eq!(found(target, false), None, "{target}");
    }
    assert_eq!(found("/upstream/none/props", true), Some(("none".to_owned(), "/props".to_owned())));
    assert_eq!(found("/upstream//props", true), None);
}

#[test]
fn a_path_of_a_thousand_segments_is_not_searched_to_its_end() {
    let target = format!("/upstream/{}", "a/".repeat(30_000));
    assert_eq!(found(&target, false).unwrap().0, "a");
}

#[test]
fn only_the_model_of_a_query_is_replaced() {
    let with = |target: &str| {
        let target = PathAndQuery::try_from(target).unwrap();
        with_model(&target, "org/b c").map(|target| target.to_string())
    };
    assert_eq!(with("/props?model=x&y=%20+"), Some("/props?model=org/b%20c&y=%20+".to_owned()));
    assert_eq!(
        with("/props?a&mod%65l&model=1&model=2"),
        Some("/props?a&mod%65l=org/b%20c&model=org/b%20c&model=org/b%20c".to_owned())
    );
    assert_eq!(with("/props?models=x"), None);
    assert_eq!(with("/props"), None);
}

proptest! {
    #[test]
    fn an_encoded_name_is_found_again(name in "[a-z/ %+é]{1,12}", rest in "(/[a-z%0-9]{0,5}){0,3}") {
        prop_assume!(!name.starts_with('/') && !name.ends_with('/') && !rest.contains('%'));
        let fleet = fleet(&[(&name, &[])]);
        let uri = Uri::try_from(format!("/upstream/{}{rest}", query::encode(&name))).unwrap();
        let named = parse_upstream(&uri, &fleet, &std::iter::empty(), false).unwrap();
        prop_assert_eq!(&named.name, &name);
        prop_assert_eq!(named.target.as_str(), if rest.is_empty() { "/" } else { rest.as_str() });
    }
}
