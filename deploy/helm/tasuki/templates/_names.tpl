{{- /* Refuses names that Kubernetes would refuse, or that two objects would have. The other names
always fit: `tasuki.name` has 40 characters at most, a pool's name 20. */ -}}

{{- /* Services are named after the release. */ -}}
{{- define "tasuki.checkRelease" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) -}}
{{- fail (printf "the release is called %q, and its Services would be, too, whose names begin with a letter and have only lower-case letters, digits and -: use such a name, as in `helm install demo …`" .Release.Name) -}}
{{- end -}}
{{- end -}}

{{- /* A pool with several hosts. A pod's label controller-revision-hash is the name of its
StatefulSet, - and 10 digits, in 63 characters: 52 are left for the name.
Arguments: root; name, values (`pool`) and `full` name of the pool. */ -}}
{{- define "tasuki.checkDividedNames" -}}
{{- $limit := 52 -}}
{{- $name := .name -}}
{{- $pools := .root.Values.pools -}}
{{- range $host := until (int .pool.hosts) -}}
{{- $taken := printf "%s-host%d" $name $host -}}
{{- if hasKey $pools $taken -}}
{{- $says := "pools.%s: the name is that of host %d of pools.%s, use another one" -}}
{{- fail (printf $says $taken $host $name) -}}
{{- end -}}
{{- end -}}
{{- $suffix := printf "-host%d" (sub (int .pool.hosts) 1) -}}
{{- $longest := printf "%s%s" .full $suffix -}}
{{- if gt (len $longest) $limit -}}
{{- $prefix := include "tasuki.name" .root -}}
{{- $poolMax := sub $limit (add (len $prefix) 1 (len $suffix)) -}}
{{- $chart := .root.Chart.Name -}}
{{- $own := ternary 0 (add1 (len $chart)) (contains $chart .root.Release.Name) -}}
{{- $releaseMax := sub $limit (add (len $name) 1 (len $suffix) $own) -}}
{{- $says := "pools.%s: the StatefulSet %s has a name of %d characters, the limit is %d" -}}
{{- $use := "use a pool's name of at most %d characters, or a release's name of at most %d" -}}
{{- $says = printf $says $name $longest (len $longest) $limit -}}
{{- fail (printf "%s: %s" $says (printf $use $poolMax $releaseMax)) -}}
{{- end -}}
{{- end -}}
